/* pieces - what a slot of a gradient, a bucket or a parameter holds, from element to element, for check.
 *
 * Most slots are one piece; a bucket of a distributed optimizer has one for each tensor in it and for each
 * part of it that a rank owns. */
#ifndef MOE_PIECES_H
#define MOE_PIECES_H

#include "sim/schedule.h"

/* Element i of a slot is what was computed for element i + (low bits of the tag) of a tensor, whose place is
 * in the high bits: of a gradient each contribution has a tag, to which this one is added. */
enum { MOE_TAG_BITS = 44 };
struct moe_content {
    int vector;                  /* of a gradient: of gradient.c, 0 is the empty sum */
    bool is_value;               /* of a parameter */
    int times;                   /* a gradient was clipped, a parameter was updated */
    double coefficient, divisor; /* divisor, op: the last division of a gradient */
    const struct moe_op *op;
    uint64_t tag;
};

struct moe_piece {
    int64_t begin, end;
    struct moe_content content;
};

struct moe_pieces { /* ascending, none empty; gaps: nothing was ever put there */
    int n, cap;
    struct moe_piece *piece;
};

/* The first piece that ends behind a position, or n. Cost: O(log n). */
int moe_pieces_find(const struct moe_pieces *p, int64_t position);
/* Appends behind the last piece, or makes it longer where it holds the same. */
void moe_pieces_add(struct moe_pieces *p, int64_t begin, int64_t end, struct moe_content content);
/* Puts `with` where begin..end was: its positions count from `begin`, and so do its tags. Cost: O(n). */
void moe_pieces_put(struct moe_pieces *p, int64_t begin, int64_t end, const struct moe_pieces *with);
void moe_pieces_free(struct moe_pieces *p);

#endif
