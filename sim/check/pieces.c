/* pieces.c - see pieces.h. */
#include "sim/check/pieces.h"

#include <stdlib.h>
#include <string.h>

int moe_pieces_find(const struct moe_pieces *p, int64_t position)
{
    int low = 0, high = p->n;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (p->piece[middle].end > position)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static bool is_same(const struct moe_content *a, const struct moe_content *b)
{
    return a->vector == b->vector && a->is_value == b->is_value && a->times == b->times &&
           a->coefficient == b->coefficient && a->divisor == b->divisor && a->op == b->op && a->tag == b->tag;
}

/* Exact for one piece, which most slots are. */
static void reserve(struct moe_pieces *p, int n)
{
    if (n <= p->cap) return;
    p->cap = n > 1 ? 2 * n : 1;
    p->piece = realloc(p->piece, (size_t)p->cap * sizeof *p->piece);
    moe_assert(p->piece);
}

void moe_pieces_add(struct moe_pieces *p, int64_t begin, int64_t end, struct moe_content content)
{
    struct moe_piece *last = p->n ? &p->piece[p->n - 1] : NULL;
    if (begin >= end) return;
    if (last && last->end == begin && is_same(&last->content, &content)) {
        last->end = end;
        return;
    }
    reserve(p, p->n + 1);
    p->piece[p->n++] = (struct moe_piece){begin, end, content};
}

static struct moe_piece moved(struct moe_piece piece, int64_t by)
{
    piece.begin += by;
    piece.end += by;
    piece.content.tag -= (uint64_t)by;
    return piece;
}

void moe_pieces_put(struct moe_pieces *p, int64_t begin, int64_t end, const struct moe_pieces *with)
{
    if (begin >= end) return;
    int from = moe_pieces_find(p, begin), to = from;
    while (to < p->n && p->piece[to].begin < end) to++;
    struct moe_piece left = {0}, right = {0};
    if (from < to) {
        left = p->piece[from];
        left.end = left.end < begin ? left.end : begin;
        right = p->piece[to - 1];
        right.begin = right.begin > end ? right.begin : end;
    }
    int n_left = left.begin < left.end, n_right = right.begin < right.end;
    int n = p->n - (to - from) + n_left + with->n + n_right;
    reserve(p, n);
    struct moe_piece *at = p->piece + from;
    if (p->n > to)
        memmove(at + n_left + with->n + n_right, p->piece + to, (size_t)(p->n - to) * sizeof *p->piece);
    if (n_left) *at++ = left;
    for (int i = 0; i < with->n; i++) *at++ = moved(with->piece[i], begin);
    if (n_right) *at = right;
    p->n = n;
}

void moe_pieces_free(struct moe_pieces *p)
{
    free(p->piece);
    *p = (struct moe_pieces){0};
}
