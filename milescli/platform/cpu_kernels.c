/* What a small model spends its time on beside matrix products, on a CPU, in float32: norms, gates,
   rotary embedding, short attention. Each is one pass over memory where PyTorch's are a chain.
   `cpu_kernel_library` compiles it where it runs; `cpu_kernels` says what each computes.

   Sums are cut alike for any number of threads, so that results are bit-equal. Strides are in
   floats; the last dim always lies in one piece. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* e^x for x <= 88, within 2 units in the last place; 0 below -87. Cephes' polynomial. */
static inline float exp_of(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } scale = {.bits = ((int32_t)n + 127) << 23};
    return p * scale.value;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }

/* Sums are cut into 8. Attention works on whole vectors: head sizes are multiples of 8, rows of
   logits padded. */
#define LANES 8
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t mask __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec at(const float *x) { return *(const vec *)x; }
static inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

static inline float total(vec x)
{
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

static inline float dot(const float *a, const float *b, int64_t count)
{
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        sums += at(a + i) * at(b + i);
    float sum = total(sums);
    for (; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

static inline float dot_of_three(const float *a, const float *b, const float *c, int64_t count)
{
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        sums += at(a + i) * at(b + i) * at(c + i);
    float sum = total(sums);
    for (; i < count; i++)
        sum += a[i] * b[i] * c[i];
    return sum;
}

/* Four vectors are computed in the time of one: each waits for its last sum. */
#define BLOCK (4 * LANES)
static inline int64_t blocks(int64_t count) { return (count + BLOCK - 1) / BLOCK * BLOCK; }

/* --- RMSNorm ---------------------------------------------------------------------------------- */

/* sum = x + residual where there is one; out = sum / sqrt(mean(sum^2) + eps) * weight. */
void rms_norm(const float *x, int64_t stride, const float *residual, const float *weight,
              float *sum, float *out, float *scales, int64_t rows, int64_t width, float eps,
              int threads)
{
#pragma omp parallel for num_threads(threads) if (rows * width > 32768)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * stride;
        if (residual) {
            float *added = sum + row * width;
            const float *other = residual + row * width;
            for (int64_t i = 0; i < width; i++)
                added[i] = from[i] + other[i];
            from = added;
        }
        float scale = 1.0f / sqrtf(dot(from, from, width) / width + eps);
        float *restrict to = out + row * width;
        for (int64_t i = 0; i < width; i++)
            to[i] = from[i] * scale * weight[i];
        if (scales)
            scales[row] = scale;
    }
}

/* grad_x, and of each block of rows its part of the weight's gradient [blocks, width]. */
void rms_norm_backward(const float *grad, int64_t grad_stride, const float *x, int64_t stride,
                       const float *weight, const float *scales, float *grad_x, float *parts,
                       int64_t rows, int64_t width, int64_t block, int threads)
{
    int64_t blocks = (rows + block - 1) / block;
#pragma omp parallel for num_threads(threads) if (rows * width > 32768)
    for (int64_t b = 0; b < blocks; b++) {
        float *restrict part = parts + b * width;
        memset(part, 0, width * sizeof(float));
        int64_t end = (b + 1) * block < rows ? (b + 1) * block : rows;
        for (int64_t row = b * block; row < end; row++) {
            const float *from = x + row * stride, *g = grad + row * grad_stride;
            float scale = scales[row], inner = dot_of_three(g, weight, from, width);
            float back = inner * scale * scale * scale / width;
            float *restrict to = grad_x + row * width;
            for (int64_t i = 0; i < width; i++) {
                part[i] += g[i] * from[i] * scale;
                to[i] = g[i] * weight[i] * scale - from[i] * back;
            }
        }
    }
}

/* --- SwiGLU ----------------------------------------------------------------------------------- */

void swiglu(const float *x, float *out, int64_t rows, int64_t width, int threads)
{
#pragma omp parallel for num_threads(threads) if (rows * width > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = x + row * 2 * width, *up = gate + width;
        float *restrict to = out + row * width;
        for (int64_t i = 0; i < width; i++)
            to[i] = gate[i] * sigmoid(gate[i]) * up[i];
    }
}

void swiglu_backward(const float *grad, const float *x, float *grad_x, int64_t rows, int64_t width,
                     int threads)
{
#pragma omp parallel for num_threads(threads) if (rows * width > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const float *g = grad + row * width, *gate = x + row * 2 * width, *up = gate + width;
        float *restrict to_gate = grad_x + row * 2 * width, *restrict to_up = to_gate + width;
        for (int64_t i = 0; i < width; i++) {
            float s = sigmoid(gate[i]);
            to_up[i] = g[i] * gate[i] * s;
            to_gate[i] = g[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
        }
    }
}

/* --- Rotary embedding ------------------------------------------------------------------------- */

/* (a, b) -> (a cos - b sin, b cos + a sin) of the halves of each head. The angles of token t stand
   in row `positions[t]`, or t where that is null. */
void rotate(const float *x, int64_t token_stride, int64_t head_stride, const float *cosine,
            const float *sine, int64_t angle_stride, const int64_t *positions, float sign,
            float *out, int64_t tokens, int64_t heads, int64_t half, int threads)
{
#pragma omp parallel for num_threads(threads) if (tokens * heads * half > 16384)
    for (int64_t token = 0; token < tokens; token++) {
        int64_t row = (positions ? positions[token] : token) * angle_stride;
        const float *c = cosine + row, *s = sine + row;
        for (int64_t head = 0; head < heads; head++) {
            const float *a = x + token * token_stride + head * head_stride, *b = a + half;
            float *restrict to = out + (token * heads + head) * 2 * half;
            for (int64_t i = 0; i < half; i++) {
                to[i] = a[i] * c[i] - sign * b[i] * s[i];
                to[half + i] = b[i] * c[i] + sign * a[i] * s[i];
            }
        }
    }
}

/* --- Attention -------------------------------------------------------------------------------- */

/* out[0 : width] (+)= sum over i of factors[i * step] * rows[i * stride + 0 : width]. */
static inline void combine(const float *factors, int64_t step, const float *rows, int64_t stride,
                           float *out, int64_t count, int64_t width, int add)
{
    int64_t from = 0;
    for (; from + BLOCK <= width; from += BLOCK) {
        const float *row = rows + from;
        float *to = out + from;
        vec a = {0}, b = {0}, c = {0}, d = {0};
        if (add)
            a = at(to), b = at(to + LANES), c = at(to + 2 * LANES), d = at(to + 3 * LANES);
        for (int64_t i = 0; i < count; i++, row += stride) {
            float factor = factors[i * step];
            a += factor * at(row);
            b += factor * at(row + LANES);
            c += factor * at(row + 2 * LANES);
            d += factor * at(row + 3 * LANES);
        }
        *(vec *)to = a, *(vec *)(to + LANES) = b;
        *(vec *)(to + 2 * LANES) = c, *(vec *)(to + 3 * LANES) = d;
    }
    for (; from < width; from += LANES) {
        const float *row = rows + from;
        vec a = {0};
        if (add)
            a = at(out + from);
        for (int64_t i = 0; i < count; i++, row += stride)
            a += factors[i * step] * at(row);
        *(vec *)(out + from) = a;
    }
}

/* w[j] = e^(w[j] * scale - shift) for j < count, 0 up to the whole vector. Returns their sum. */
static inline float exps(float *w, int64_t count, float scale, float shift)
{
    float sums[LANES] = {0};
    int64_t end = padded(count);
    for (int64_t j = 0; j < end; j += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) {
            float value = exp_of(w[j + lane] * scale - shift);
            w[j + lane] = j + lane < count ? value : 0.0f;
            sums[lane] += w[j + lane];
        }
    return total(at(sums));
}

static inline vec larger(vec a, vec b)
{
    mask is_a = a > b;
    return (vec)((is_a & (mask)a) | (~is_a & (mask)b));
}

static inline float largest(const float *w, int64_t count)
{
    float most = w[0];
    if (count < LANES) {
        for (int64_t j = 1; j < count; j++)
            most = w[j] > most ? w[j] : most;
        return most;
    }
    vec mosts = at(w + count - LANES);
    for (int64_t j = 0; j + LANES < count; j += LANES)
        mosts = larger(at(w + j), mosts);
    for (int lane = 0; lane < LANES; lane++)
        most = mosts[lane] > most ? mosts[lane] : most;
    return most;
}

/* One new token of each request over a cache of slots: request b has lens[b] tokens in the slots of
   its row of `table`; a window > 0 sees the last so many of them. Query [B, H, D], caches
   [slots, K, D]; out [B, H, D]; `logs` [H, B], if given: the logarithm of each softmax's sum. */
void attend_slots(const float *query, int64_t query_stride, const float *keys, const float *values,
                  const int32_t *table, int64_t table_stride, const int64_t *requests,
                  const int64_t *lens, float *out, float *logs, int64_t batch, int64_t heads,
                  int64_t groups, int64_t size, int64_t longest, float scale, int64_t window,
                  int threads)
{
    int64_t share = heads / groups, step = groups * size;
#pragma omp parallel num_threads(threads) if (batch * heads * longest * size > 65536)
    {
        float *w = malloc(padded(longest) * sizeof(float));
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t b = 0; b < batch; b++)
            for (int64_t h = 0; h < heads; h++) {
                int64_t start = window > 0 && lens[b] > window ? lens[b] - window : 0;
                int64_t count = lens[b] - start;
                const int32_t *slots = table + requests[b] * table_stride + start;
                const float *q = query + b * query_stride + h * size;
                const float *key = keys + h / share * size, *value = values + h / share * size;
                for (int64_t j = 0; j < count; j++) {
                    const float *row = key + slots[j] * step;
                    w[j] = dot(q, row, size);
                }
                for (int64_t j = count; j < padded(count); j++)
                    w[j] = 0.0f;
                float shift = largest(w, count) * scale, sum = exps(w, count, scale, shift);
                float factor = 1.0f / sum;
                if (logs)
                    logs[h * batch + b] = shift + logf(sum);
                float *to = out + (b * heads + h) * size;
                for (int64_t i = 0; i < size; i += BLOCK) {
                    int64_t whole = size - i < BLOCK ? (size - i) / LANES : 4;
                    vec sums[4] = {{0}};
                    if (whole == 4)
                        for (int64_t j = 0; j < count; j++) {
                            const float *row = value + slots[j] * step + i;
                            for (int part = 0; part < 4; part++)
                                sums[part] += w[j] * at(row + part * LANES);
                        }
                    else
                        for (int64_t j = 0; j < count; j++)
                            for (int part = 0; part < whole; part++)
                                sums[part] += w[j] * at(value + slots[j] * step + i + part * LANES);
                    for (int part = 0; part < whole; part++)
                        *(vec *)(to + i + part * LANES) = sums[part] * factor;
                }
            }
        free(w);
    }
}

/* [length, size] rows -> [size, pad]: positions beside each other, zero behind the last. */
static void transpose(const float *x, int64_t stride, float *out, int64_t length, int64_t size,
                      int64_t pad)
{
    for (int64_t i = 0; i < size; i++) {
        for (int64_t j = 0; j < length; j++)
            out[i * pad + j] = x[j * stride + i];
        for (int64_t j = length; j < pad; j++)
            out[i * pad + j] = 0.0f;
    }
}

/* Causal, within each sequence: sequence n lies in tokens starts[n] to starts[n + 1]. Query, out
   [S, H, D], key and value [S, K, D]; `logs` [H, S]: the logarithm of each softmax's sum. The first
   skips[n] queries of a sequence are left out; NULL: none are. */
void attend_packed(const float *query, int64_t query_stride, const float *key, int64_t key_stride,
                   const float *value, int64_t value_stride, const int32_t *starts,
                   const int32_t *skips, float *out, float *logs, int64_t sequences,
                   int64_t tokens, int64_t heads, int64_t groups, int64_t size, int64_t longest,
                   float scale, int threads)
{
    int64_t share = heads / groups, pad = blocks(longest);
#pragma omp parallel num_threads(threads)
    {
        float *keys = malloc((size + 1) * pad * sizeof(float)), *w = keys + size * pad;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t n = 0; n < sequences; n++)
            for (int64_t g = 0; g < groups; g++) {
                int64_t first = starts[n], length = starts[n + 1] - first;
                const float *rows = value + first * value_stride + g * size;
                transpose(key + first * key_stride + g * size, key_stride, keys, length, size, pad);
                for (int64_t h = g * share; h < (g + 1) * share; h++)
                    for (int64_t i = skips ? skips[n] : 0; i < length; i++) {
                        int64_t token = first + i;
                        combine(query + token * query_stride + h * size, 1, keys, pad, w, size,
                                blocks(i + 1), 0);
                        float shift = largest(w, i + 1) * scale;
                        float sum = exps(w, i + 1, scale, shift), factor = 1.0f / sum;
                        for (int64_t j = 0; j < padded(i + 1); j++)
                            w[j] *= factor;
                        combine(w, 1, rows, value_stride, out + (token * heads + h) * size, i + 1,
                                size, 0);
                        logs[h * tokens + token] = shift + logf(sum);
                    }
            }
        free(keys);
    }
}

void attend_packed_backward(const float *grad, int64_t grad_stride, const float *query,
                            int64_t query_stride, const float *key, int64_t key_stride,
                            const float *value, int64_t value_stride, const int32_t *starts,
                            const int32_t *skips, const float *logs, float *grad_query,
                            float *grad_key, float *grad_value, int64_t sequences, int64_t tokens,
                            int64_t heads, int64_t groups, int64_t size, int64_t longest,
                            float scale, int threads)
{
    int64_t share = heads / groups, pad = blocks(longest), plane = size * pad;
#pragma omp parallel num_threads(threads)
    {
        float *keys = malloc(2 * (plane + longest * pad) * sizeof(float)), *values = keys + plane;
        float *weights = values + plane, *slopes = weights + longest * pad;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t n = 0; n < sequences; n++)
            for (int64_t g = 0; g < groups; g++) {
                int64_t first = starts[n], length = starts[n + 1] - first;
                int64_t skip = skips ? skips[n] : 0;
                const float *rows = key + first * key_stride + g * size;
                transpose(rows, key_stride, keys, length, size, pad);
                transpose(value + first * value_stride + g * size, value_stride, values, length,
                          size, pad);
                for (int64_t h = g * share; h < (g + 1) * share; h++) {
                    const float *q = query + first * query_stride + h * size;
                    const float *above = grad + first * grad_stride + h * size;
                    for (int64_t i = skip; i < length; i++) {
                        float *w = weights + i * pad, *slope = slopes + i * pad;
                        int64_t token = first + i, width = padded(i + 1);
                        combine(q + i * query_stride, 1, keys, pad, w, size, blocks(i + 1), 0);
                        exps(w, i + 1, scale, logs[h * tokens + token]);
                        combine(above + i * grad_stride, 1, values, pad, slope, size,
                                blocks(i + 1), 0);
                        float mean = dot(w, slope, width);
                        for (int64_t j = 0; j < width; j++)
                            slope[j] = w[j] * (slope[j] - mean) * scale;
                        combine(slope, 1, rows, key_stride, grad_query + (token * heads + h) * size,
                                i + 1, size, 0);
                    }
                    for (int64_t j = 0; j < length; j++) {
                        int64_t to = ((first + j) * groups + g) * size, more = h > g * share;
                        int64_t i = j > skip ? j : skip;
                        combine(slopes + i * pad + j, pad, q + i * query_stride, query_stride,
                                grad_key + to, length - i, size, more);
                        combine(weights + i * pad + j, pad, above + i * grad_stride, grad_stride,
                                grad_value + to, length - i, size, more);
                    }
                }
            }
        free(keys);
    }
}
