/* collective_nodes - all-reduce, all-gather and reduce-scatter between nodes (and in one without NCCL's
 * numbers): as flows, and their closed forms.
 *
 * A node has R rails, as many as every node has NICs and members for. Rail r goes through its members in
 * their order, turned so that the first is next to a NIC of its own. N nodes, n members, S bytes:
 *
 *   ring      R rings over all members, node by node, each a share of every block.
 *   tree      All-reduce. A rail is a chain of each node's members, and two binary trees (moe_tree_parent)
 *             join the first ones of all nodes; each tree has half of the rail's S / R. Sums go up while
 *             results come down: S / R each way over a hop of a chain, S / 2R over an edge of a tree. An
 *             inner node of one tree is a leaf of the other, with 3 edges and 1: the NICs of the busiest
 *             node send 2 S, of 3 nodes 3/2 S, of two S, where rings send 2 S (n - 1) / n.
 *   nvlstree  All-reduce. Switches add up and multiply in the node (NVLS): a member sends all of S, and, as
 *             one of H heads, its S / H of the sum for all; H: members of the smallest node. As much comes
 *             back; a flow stands for both ways of the ports, all at the pace of heads. Heads are joined as
 *             above, by S / 2H over an edge. The second part of a lone head is in no flow: it would lead back
 *             to it.
 *   pat       All-gather of nodes with one member each. What the member at i has goes to those at i - o
 *             (mod n) along a binomial tree: o without its lowest bit hands on to o, far steps first. The
 *             step of distance d moves the blocks of members 0, 2d, 4d ... behind, so a member sends n - 1 in
 *             all. A flow follows the one that came with the step before. Reduce-scatter is the reverse.
 *
 * NCCL's protocol puts `wire` bytes on the way for each, and its channels move no more than most_Bps of S: a
 * flow of b bytes b / S of that. In rings and trees chunks follow each other so closely that all links are
 * busy from start to end.
 * Source: NVIDIA/nccl src/graph/trees.cc, connect.cc (trees, heads), src/include/collectives.h (PAT). NCCL's
 * balanced trees have one child at the second member of a chain: the same bytes on links and NICs.
 */
#ifndef MOE_COLLECTIVE_NODES_H
#define MOE_COLLECTIVE_NODES_H

#include "sim/cost/collective.h"

/* all: nccl-tests' size, > 0; m->n >= 2. Adds to out. Cost: O(n R), of PAT O(n^2). */
void moe_nodes_plan(const struct moe_topo *t, const struct moe_moved *m, int64_t all, struct moe_plan *out);

/* Seconds on an idle machine of `nodes` nodes of per_node members, equal to the plan but for 1 ps a step. */
double moe_nodes_s(const struct moe_topo *t, const struct moe_nccl_case *c, int nodes, int per_node);

/* The node above node i in tree 0 or 1 of NCCL's double binary tree over `nodes` nodes; -1: i is its root. */
int moe_tree_parent(int nodes, int tree, int i);

#endif
