/* presets.c - models by name; see scenario.h.
 *
 * Sizes are those of the configuration that was published with each model; `sequence` is what it is trained
 * on, which configurations do not say. Every layer of ours is attention and a mixture of experts, so `layers`
 * counts the layers of the model that hold experts. What our model cannot say is listed with each as `not
 * here`. */
#include "sim/scenario.h"

#include <string.h>

static const struct preset {
    const char *name;
    int64_t layers, hidden, ffn, experts, top_k, heads, sequence;
} presets[] = {
    /* huggingface.co/mistralai/Mixtral-8x7B-v0.1 config.json; sequence: Megatron-LM examples/mixtral.
     * not here: 8 key-value heads for 32 heads (GQA), vocabulary 32,000. */
    {"mixtral_8x7b", 32, 4096, 14336, 8, 2, 32, 4096},
    /* huggingface.co/deepseek-ai/DeepSeek-V3 config.json; sequence: arXiv 2412.19437, section 4.2.
     * not here: 3 dense layers before these 58, one shared expert, multi-head latent attention (128 heads of
     * 192 for queries and keys, ours are of 56), at most 4 groups of experts a token, the layer that predicts
     * a second token, vocabulary 129,280. */
    {"deepseek_v3", 58, 7168, 2048, 256, 8, 128, 4096},
    /* huggingface.co/Qwen/Qwen3-235B-A22B config.json; sequence: arXiv 2505.09388, section 3.2.
     * not here: 4 key-value heads for 64 heads (GQA), heads of 128 (ours are of 64), vocabulary 151,936. */
    {"qwen3_moe_235b", 94, 4096, 1536, 128, 8, 64, 4096},
    /* huggingface.co/allenai/OLMoE-1B-7B-0924 config.json; sequence: arXiv 2409.02060, table 10.
     * not here: norms of queries and keys, vocabulary 50,304. */
    {"olmoe_1b_7b", 16, 2048, 1024, 64, 8, 16, 4096},
    /* huggingface.co/google/switch-base-128 config.json: 6 layers with experts in the encoder, 6 in the
     * decoder; sequence: arXiv 2101.03961, section 2.3. not here: the 12 dense layers between them, attention
     * to the encoder, experts of two matrices with ReLU (ours have three, SwiGLU), vocabulary 32,128. */
    {"switch_base_128", 12, 768, 3072, 128, 1, 12, 512},
};
enum { N = sizeof presets / sizeof *presets };

int moe_scenario_preset(struct moe_scenario *sc, const char *name)
{
    const char *names[N];
    for (int i = 0; i < N; i++) {
        const struct preset *p = &presets[i];
        names[i] = p->name;
        if (strcmp(p->name, name) != 0) continue;
        sc->layers = p->layers;
        sc->hidden = p->hidden;
        sc->ffn = p->ffn;
        sc->experts = p->experts;
        sc->top_k = p->top_k;
        sc->heads = p->heads;
        sc->sequence = p->sequence;
        return MOE_OK;
    }
    const char *nearest = moe_nearest(name, names, N);
    return moe_fail(MOE_EINPUT, "unknown preset '%s'%s%s%s", name, nearest ? " (did you mean '" : "",
                    nearest ? nearest : "", nearest ? "'?)" : "");
}
