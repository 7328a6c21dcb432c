/* bf16 - the 16-bit floating-point type of training, emulated: the upper half of a float.
 *
 * 1 sign bit, 8 of exponent as float has, 7 of significand after the hidden one: unit roundoff 2^-8. A sum of
 * two bf16 is rounded rightly by computing it in float first: float has 24 bits of significand, more than the
 * 2 * 8 + 2 from which on rounding twice does no harm. Stands on nothing.
 * Source: the format of Intel's bfloat16 white paper, 2018; rounding twice: Figueroa, SIGNUM 1995. */
#ifndef MOE_BF16_H
#define MOE_BF16_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define MOE_ANYWHERE __host__ __device__
#else
#define MOE_ANYWHERE
#endif

typedef uint16_t moe_bf16; /* bits */

/* Result: the same value; exact. */
MOE_ANYWHERE static inline float moe_bf16_to_float(moe_bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Result: the nearest bf16, of two equally near the one with an even last bit; infinity from 2^128 - 2^119
 * on; denormal numbers are rounded like others. NaN stays NaN, quiet, with its sign and the upper bits of its
 * payload. */
MOE_ANYWHERE static inline moe_bf16 moe_bf16_from_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t quiet = bits >> 16 | 0x40; /* a payload in the lower half alone would leave an infinity */
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (moe_bf16)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

#endif
