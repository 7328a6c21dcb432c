/* gshard.c - the dispatcher `gshard`: every rank sends every expert the same number of rows, [E, C, H].
 *
 * As GShard, DeepSpeed and Tutel do: C rows an expert, the missing ones zero, so that an all-to-all of equal
 * parts moves them and no counts are exchanged; each rank takes for granted that the others have its C. The
 * capacity rule says what C is; `dropless` makes it the largest count of the group. The steps are those of
 * `alltoall` with padded rows. Bytes of one rank and direction: C x E x (P - 1) / P x H x element size,
 * whatever the routing is. Not expressed: DeepSpeed's dispatch as a product with a mask [S, E, C], which
 * takes longer than moving rows. Source: Lepikhin et al. 2020 (GShard); founding_cases.md A.1 5, A.2 5. */
#include "sim/lower/lower.h"

void moe_gshard(struct moe_builder *b, const struct moe_layer *m)
{
    moe_assert(m->padded_rows);
    moe_alltoall(b, m);
}
