/* kernel_shapes - what each kernel reads and writes: types, roles and elements, in dims; one row a kernel.
 *
 * A row: "T E K: logits[TE] > prob[TE] expert:index[TK] slot:index[TK] counts:routed[E]"
 *   T E K      the dims, one letter each, in the order of moe_op.dims
 *   name       of an operand. dNAME is the gradient of NAME: in a kernel that has both, and in the
 *              backward of a kernel that has one of them. The same name in both lists: one tensor,
 *              changed in place
 *   '+' '~'    before it: writes that may accumulate; writes that may be the first read
 *   ':kind'    of MOE_OPERANDS; without: real numbers of the operation's type
 *   '?'        may be left out
 *   [TE]       elements: the product of dims and digits, '*' rows of all groups, '#' what the counts that
 *              are read add up to
 * Source: kernels/ref.h, which says what is computed. */
#ifndef MOE_KERNEL_SHAPES_H
#define MOE_KERNEL_SHAPES_H

#include "sim/schedule.h"

/* clang-format off */
/*        text      type of the elements; MOE_TYPE_COUNT: of the operation */
#define MOE_OPERANDS(X) \
        X(REAL,   "real",   MOE_TYPE_COUNT) \
        X(MOVED,  "moved",  MOE_TYPE_COUNT) /* integers too: they are only moved */ \
        X(ANY,    "any",    MOE_TYPE_COUNT) /* and in any buffer */ \
        X(INDEX,  "index",  MOE_I32) \
        X(INPUT,  "input",  MOE_I32) \
        X(COUNT,  "count",  MOE_I64) \
        X(ROUTED, "routed", MOE_I64)        /* what a routing says: in a COUNTS buffer */ \
        X(HELD,   "held",   MOE_TYPE_COUNT) /* parameters and gradients */ \
        X(NORM,   "norm",   MOE_F64) \
        X(PARAM,  "param",  MOE_TYPE_COUNT) \
        X(STATE,  "state",  MOE_TYPE_COUNT) \
        X(OUTPUT, "output", MOE_TYPE_COUNT)
/* clang-format on */
#define X(name, text, type) MOE_OPERAND_##name,
enum moe_operand_kind { MOE_OPERANDS(X) MOE_OPERAND_KIND_COUNT };
#undef X

/* Members of moe_op that a kernel computes with beside its dims. */
enum {
    MOE_USES_FACTOR = 1,
    MOE_USES_DIVISOR = 2,
    MOE_USES_DECAY = 4,
    MOE_USES_MODE = 8,
    MOE_USES_TRANS = 16
};

struct moe_operand {
    char name[16];
    enum moe_operand_kind kind;
    enum moe_type type; /* MOE_TYPE_COUNT: of the operation */
    bool optional, adds, in_place;
    int64_t times;          /* extent: this number, */
    int n_dims;             /* these dims, */
    int dims[MOE_DIMS];     /* places in moe_op.dims, */
    bool by_rows, by_total; /* the rows of all groups, the sum of the counts that are read */
};

struct moe_kernel_shape {
    int n_dims, n_reads, n_writes;
    char dim[MOE_DIMS];       /* letters */
    uint32_t free_dims;       /* bit i: no extent tells dim i */
    enum moe_kernel backward; /* MOE_K_COUNT: none */
    uint32_t uses;            /* MOE_USES_ bits */
    struct moe_operand reads[MOE_REFS], writes[MOE_REFS];
};

/* The rows, parsed: [MOE_K_COUNT], to be freed. Aborts on a kernel without a row, or a row that is no row. */
struct moe_kernel_shape *moe_kernel_shapes(void);
/* Has the operation as many dims, reads and writes as its kernel needs? *least: writes that it needs. */
bool moe_kernel_has_lists(const struct moe_kernel_shape *k, const struct moe_op *op, int *least);
/* Why a kernel must not write what writes[w] names: the words before the name of the operand *other; NULL: it
 * may. What is changed in place is read and written under one name; nothing else overlaps. */
const char *moe_kernel_overlap(const struct moe_schedule *s, const struct moe_kernel_shape *k,
                               const struct moe_op *op, int w, const char **other);
/* The type that an operation of this kernel has, where all its operands are integers; MOE_TYPE_COUNT: any. */
enum moe_type moe_kernel_type(const struct moe_kernel_shape *k);
/* Bit i: writes[i] may accumulate. Cost: one look at the row's text. */
uint32_t moe_kernel_adds(enum moe_kernel kernel);

#endif
