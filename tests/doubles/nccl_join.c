/* nccl_join.c - see nccl_double.h: how the ranks of a communicator find each other and build one of MPI.
 *
 * Each tells all processes that it has come. A rank that knows of all waits for the token, which goes through
 * the members in the order of their places in MPI_COMM_WORLD and makes each busy with this communicator
 * alone; the last one says go, and then all are, or will at their next call be, in the one MPI call that
 * waits for its peers. (Without the token two ranks could be in two such calls, each waiting for the other.)
 * */
#include "tests/doubles/nccl_double.h"

#include <stdlib.h>
#include <string.h>

enum { CAME = 1, TOKEN, GO };

struct nccl_note {
    uint64_t key[2], host;
    int32_t kind, n, rank, world, color, order, device; /* device: -1 where a process sees only one */
};

/* Notes heard and not used yet, and notes on their way. */
struct letter {
    struct letter *next;
    struct nccl_note note;
    MPI_Request request;
};

static struct letter *heard, *sent;
static struct nccl_join *joins;
static const struct nccl_join *busy_with; /* took the token, not built yet */

static void *need(size_t n, size_t each)
{
    void *p = calloc(n ? n : 1, each);
    if (!p) moe_double_wrong("no memory for %zu x %zu bytes", n, each);
    return p;
}

/* Where what is still going on would wait for others: not finalised, so that mpirun ends the job. */
static void at_exit(void)
{
    int over;
    MPI_Finalized(&over);
    if (over || joins) return;
    for (const double give_up = MPI_Wtime() + 2; !nccl_unit_settle();)
        if (MPI_Wtime() > give_up) return;
    if (!nccl_outstanding()) MPI_Finalize();
}

/* MPI_Finalize takes what MPI_COMM_SELF has first, whoever calls it. */
static int at_finalize(MPI_Comm comm, int key, void *value, void *state)
{
    (void)comm, (void)key, (void)value, (void)state;
    nccl_free_mpi();
    return MPI_SUCCESS;
}

void nccl_mpi(void)
{
    static bool begun;
    int before, provided, key;
    if (begun) return;
    begun = true;
    MPI_Initialized(&before);
    if (!before) {
        MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
        atexit(at_exit);
    }
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, at_finalize, &key, NULL);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
    MPI_Comm_free_keyval(&key); // lives until the attribute is gone
}

static void tell(struct nccl_note note, int world)
{
    struct letter *l = need(1, sizeof *l);
    l->note = note;
    l->next = sent;
    sent = l;
    MPI_Isend(&l->note, (int)sizeof l->note, MPI_BYTE, world, NCCL_TAG_NOTE, MPI_COMM_WORLD, &l->request);
}

static void post(void)
{
    for (struct letter **at = &sent, *l; (l = *at);) {
        int done;
        MPI_Test(&l->request, &done, MPI_STATUS_IGNORE);
        if (!done) {
            at = &l->next;
            continue;
        }
        *at = l->next;
        free(l);
    }
    for (int any = 1; any;) {
        MPI_Iprobe(MPI_ANY_SOURCE, NCCL_TAG_NOTE, MPI_COMM_WORLD, &any, MPI_STATUS_IGNORE);
        if (!any) break;
        struct letter *l = need(1, sizeof *l);
        MPI_Recv(&l->note, (int)sizeof l->note, MPI_BYTE, MPI_ANY_SOURCE, NCCL_TAG_NOTE, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
        l->next = heard;
        heard = l;
    }
}

/* Takes a note of this kind for `join` out of those heard. */
static bool take(const struct nccl_join *join, int kind, struct nccl_note *out)
{
    for (struct letter **at = &heard, *l; (l = *at); at = &l->next) {
        const struct nccl_note *x = &l->note;
        if (x->kind != kind || memcmp(x->key, join->key, sizeof x->key) != 0) continue;
        if (kind == CAME ? x->n != join->n : x->color != join->color) continue;
        *out = *x;
        *at = l->next;
        free(l);
        return true;
    }
    return false;
}

static uint64_t host(void)
{
    char name[MPI_MAX_PROCESSOR_NAME];
    int n;
    uint64_t hash = 14695981039346656037u;
    MPI_Get_processor_name(name, &n);
    for (int i = 0; i < n; i++) hash = (hash ^ (unsigned char)name[i]) * 1099511628211u;
    return hash;
}

struct nccl_join *nccl_join_new(struct ncclComm *comm, struct ncclComm *parent, const uint64_t key[2], int n,
                                int rank, int color, int order)
{
    struct nccl_join *join = need(1, sizeof *join);
    *join = (struct nccl_join){.comm = comm,
                               .parent = parent,
                               .key = {key[0], key[1]},
                               .n = n,
                               .rank = rank,
                               .color = color,
                               .order = order};
    join->came = need((size_t)n, sizeof *join->came);
    return join;
}

void nccl_join_free(struct nccl_join *join)
{
    free(join->came);
    free(join);
}

void nccl_join_start(struct nccl_join *join)
{
    int size, me, devices = 0, device = 0;
    nccl_mpi();
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    cudaGetDeviceCount(&devices);
    cudaGetDevice(&device);
    const struct nccl_note note = {.key = {join->key[0], join->key[1]},
                                   .host = host(),
                                   .kind = CAME,
                                   .n = join->n,
                                   .rank = join->rank,
                                   .world = me,
                                   .color = join->color,
                                   .order = join->order,
                                   .device = devices > 1 ? device : -1};
    join->came[join->rank] = note;
    const struct ncclComm *parent = join->parent;
    for (int r = 0, n = parent ? parent->n : size; r < n; r++) {
        const int world = parent ? parent->world[r] : r;
        if (world != me) tell(note, world);
    }
    struct nccl_join **at = &joins;
    while (*at) at = &(*at)->next;
    *at = join;
}

/* The members of this rank's communicator, in the order of their new ranks. Result: their number. */
static int members_of(const struct nccl_join *join, const struct nccl_note **members)
{
    int n = 0;
    for (int r = 0; r < join->n; r++) {
        const struct nccl_note *x = &join->came[r];
        if (x->color != join->color) continue;
        int at = n++;
        for (; at > 0 && members[at - 1]->order > x->order; at--) members[at] = members[at - 1];
        members[at] = x;
    }
    return n;
}

/* The member that the token visits after `world` (-1: the first); -1: none. */
static int after(const struct nccl_note **members, int n, int world)
{
    int next = -1;
    for (int i = 0; i < n; i++)
        if (members[i]->world > world && (next < 0 || members[i]->world < next)) next = members[i]->world;
    return next;
}

static void build(struct nccl_join *join, const struct nccl_note **members, int n)
{
    struct ncclComm *c = join->comm;
    MPI_Group all, group;
    c->n = n;
    c->world = need((size_t)n, sizeof *c->world);
    c->sent = need((size_t)n, sizeof *c->sent);
    c->received = need((size_t)n, sizeof *c->received);
    for (int r = 0; r < n; r++) {
        c->world[r] = members[r]->world;
        if (members[r]->rank == join->rank) c->rank = r;
    }
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, n, c->world, &group);
    MPI_Comm_create_group(MPI_COMM_WORLD, group, NCCL_TAG_CREATE + (int)(c->key[0] % NCCL_CREATE_TAGS),
                          &c->mpi);
    MPI_Group_free(&group);
    MPI_Group_free(&all);
    c->ready = true;
    if (join->out) *join->out = c;
}

static bool same_gpu(const struct nccl_note **members, int n)
{
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++)
            if (members[i]->device >= 0 && members[i]->device == members[j]->device &&
                members[i]->host == members[j]->host) {
                nccl_fail(ncclInvalidUsage,
                          "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", j, i,
                          members[i]->device);
                return true;
            }
    return false;
}

/* The token, and after it the building. Result: over. */
static bool pass_token(struct nccl_join *join, const struct nccl_note **members, int n)
{
    struct nccl_note note = join->came[join->rank];
    const int me = note.world;
    if (!join->passed) {
        if (busy_with) return false;
        if (after(members, n, -1) != me && !take(join, TOKEN, &note)) return false;
        busy_with = join;
        join->passed = true;
        const int next = after(members, n, me);
        note.kind = next < 0 ? GO : TOKEN;
        if (next >= 0) tell(note, next);
        for (int i = 0; i < n && next < 0; i++) tell(note, members[i]->world); /* this rank too */
        post();
    }
    if (!take(join, GO, &note)) return false;
    build(join, members, n);
    busy_with = NULL;
    return true;
}

static bool go_on(struct nccl_join *join)
{
    struct nccl_note note;
    while (take(join, CAME, &note))
        if (note.rank >= 0 && note.rank < join->n && !join->came[note.rank].kind)
            join->came[note.rank] = note;
    for (int r = 0; r < join->n; r++)
        if (!join->came[r].kind) return false;
    if (!join->comm) return true;
    const struct nccl_note **members = need((size_t)join->n, sizeof *members);
    const int n = members_of(join, members);
    bool over = true;
    if (same_gpu(members, n)) {
        (join->parent ? join->parent : join->comm)->state = ncclInvalidUsage;
    } else {
        over = pass_token(join, members, n);
    }
    free(members);
    return over;
}

void nccl_join_progress(void)
{
    if (!joins && !sent) return;
    post();
    for (struct nccl_join **at = &joins, *join; (join = *at);) {
        if (!go_on(join)) {
            at = &join->next;
            continue;
        }
        *at = join->next;
        nccl_join_free(join);
    }
}

void nccl_join_abort(const struct ncclComm *comm)
{
    for (struct nccl_join **at = &joins, *join; (join = *at);) {
        if (join->comm != comm && join->parent != comm) {
            at = &join->next;
            continue;
        }
        *at = join->next;
        if (busy_with == join) busy_with = NULL;
        nccl_join_free(join);
    }
}

bool nccl_join_pending(const struct ncclComm *comm)
{
    for (const struct nccl_join *join = joins; join; join = join->next)
        if (join->parent ? join->parent == comm : join->comm == comm) return true;
    return false;
}
