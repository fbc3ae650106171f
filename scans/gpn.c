/* GPN's steps over a segment and their gradient, on a CPU: `CSteps` in gpn_cpu.py, which compiles this file
   (float; -DDOUBLE: double; -DBF16: float with factors of products rounded to bf16) and calls it with
   ctypes. `KernelSteps` in gpn_gpu.py is the same in PyTorch and Triton, except that dt_bias, here in the
   input product's bias, is added later there, and that inactive rows are not skipped there.

   A step is 1 + 2 L products of a few rows with large weights, and small loops between them. Products
   run in register tiles, on weights in panels that a tile reads contiguously. The small loops are
   written for the compiler to vectorize. OpenMP threads share panels, heads or rows.

       S steps   B rows   C state   F feed-forward   H heads   K x D head memory   L layers   Y = F + H D
       W = width(n, l), the columns of z, the input product, which gpn.py draws
   Arrays of pointers, by index, for layer l; r: memory read
       w       0, 1: weight, bias of the ground gate   2 + 3l, 3 + 3l: those of z   4 + 3l: weight of y
               2 + 3L: decay rates                     3 + 3L: first key
       saved   l: state after the layer        L: z of the ground gate     L + 1 + 2l: z   L + 2 + 2l: r
       pairs   0, 1: dz, n(s) of the ground gate   2 + 4l, 3 + 4l: dz, n(x)   4 + 4l, 5 + 4l: dout, y
               For l > 0, pairs[4l] is dout of the layer below, so it is also dx of layer l.
*/
#include <stdlib.h>
#include <tgmath.h>

#ifdef DOUBLE
typedef double real;
typedef long long integer;
enum { LARGEST = 708, TERMS = 13, BIAS = 1023, MANTISSA = 52 };
#else
typedef float real;
typedef int integer;
enum { LARGEST = 87, TERMS = 7, BIAS = 127, MANTISSA = 23 };
#endif

#ifdef __AVX512F__
enum { BYTES = 64, ROWS = 8 };  /* per vector; per tile: ROWS x 2 vectors fit in registers */
#elif defined __AVX__
enum { BYTES = 32, ROWS = 4 };
#else
enum { BYTES = 16, ROWS = 4 };
#endif
enum { HALF = ROWS / 2, LANES = BYTES / sizeof(real), PANEL = 2 * LANES };
enum { MIN_PARALLEL = 1 << 18 };  /* multiplications in a product from which threads are used */
typedef real vector __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));

/* PAIR adjacent factors are multiplied and added by one instruction. */
#ifdef BF16
#ifndef __AVX512BF16__
#error no bf16 units
#endif
#include <immintrin.h>
typedef unsigned short factor;
typedef int both __attribute__((may_alias));
enum { PAIR = 2 };
#else
typedef real factor;
enum { PAIR = 1 };
#endif
/* fields in gpn_cpu.py; C to L in the order of `Sizes` in gpn.py */
typedef struct { long S, B, C, F, H, K, D, L, threads, keep; real state_eps, read_eps, key_eps; } sizes;

/* EACH: iterations are independent, except for sums; pointers that alias are only accessed at index i.
   SHARED: iterations are split over the threads, with a barrier at the end. Every thread runs the code
   around it, so that code may only write local variables. */
#define EACH(i, n) _Pragma("GCC ivdep") for (long i = 0; i < (n); i++)
#define SHARED(i, n) _Pragma("omp for") for (long i = 0; i < (n); i++)
#define INLINE static inline __attribute__((always_inline))

const int panel = PANEL, pair = PAIR;

/* ---- y (B, n) = x (B, c) W^T + bias; W in panels (ceil(n / PANEL), ceil(c / PAIR), PANEL, PAIR) ---- */

/* Add x w to sum, with the same PAIR of x for all lanes of a vector of W. sum: at an address, because
   GCC 16 for ARM crashes on arguments of type `vector`. */
INLINE void add_product(vector *sum, const factor *x, const factor *w) {
#ifdef BF16
    const __m512i pairs = _mm512_set1_epi32(*(both *)x);
    *sum = (vector)_mm512_dpbf16_ps((__m512)*sum, (__m512bh)pairs, (__m512bh)_mm512_loadu_si512(w));
#else
    *sum += *x * *(vector *)w;
#endif
}

INLINE void tile(const int R, const factor *x, const factor *w, const real *bias, real *y, long c, long n,
                 long columns) {
    vector sum[ROWS][2];
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = (vector){0};
    for (long i = 0; i < c; i += PAIR)
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++)
                add_product(&sum[r][half], x + r * c + i, w + i * PANEL + half * LANES * PAIR);
    for (int r = 0; r < R; r++)
        EACH(j, columns) y[r * n + j] = ((real *)sum[r])[j] + (bias ? bias[j] : 0);
}

/* All threads must call it. room: B (c + 1) factors, for x rounded to bf16 with -DBF16 */
static void product(const real *x, const real *weight, const real *bias, real *y, long B, long c, long n,
                    factor *room) {
    const factor *rows = (const factor *)x, *w = (const factor *)weight;
#ifdef BF16
    const long even = (c + 1) / 2 * 2;
    SHARED(b, B) {
        room[b * even + even - 1] = 0;
        EACH(i, c) {
            union { real number; unsigned bits; } one = {x[b * c + i]};
            room[b * even + i] = (one.bits + 0x7fff + (one.bits >> 16 & 1)) >> 16;  /* to nearest, ties to even */
        }
    }
    rows = room, c = even;
#endif
    SHARED(p, (n + PANEL - 1) / PANEL) {
        long j = p * PANEL, b = 0, columns = n - j < PANEL ? n - j : PANEL;
        const real *some = bias ? bias + j : 0;
        for (; b + ROWS <= B; b += ROWS) tile(ROWS, rows + b * c, w + j * c, some, y + b * n + j, c, n, columns);
        for (; b + HALF <= B; b += HALF) tile(HALF, rows + b * c, w + j * c, some, y + b * n + j, c, n, columns);
        for (; b < B; b++) tile(1, rows + b * c, w + j * c, some, y + b * n + j, c, n, columns);
    }
}

/* ---- operations of a step ---- */

/* Vectorizable exp(x) = 2^n exp(r), |r| < 0.35, by its series */
INLINE real exponential(real x) {
    x = x < -LARGEST ? -LARGEST : x > LARGEST ? LARGEST : x;
    real n = rint(x * (real)1.4426950408889634), r = x - n * (real)0.6931471805599453, sum = 1;
    for (int i = TERMS; i > 0; i--) sum = 1 + sum * r * (1 / (real)i);
    union { integer bits; real number; } scale = {((integer)n + BIAS) << MANTISSA};
    return sum * scale.number;
}
INLINE real sigmoid(real x) { return 1 / (1 + exponential(-x)); }
INLINE real softplus(real x) { return x > 20 ? x : log1p(exp(x)); }

/* eq. 9; a: the decay's column of z. Their derivatives: dz[write_gate], dz[decay_gate] and drate. */
INLINE real beta_of(real z) { return sigmoid(z); }
INLINE real decay_of(real rate, real a) { return exponential(-rate * softplus(a)); }

/* y = x / sqrt(|x|^2 + eps^2). Returns 1 / sqrt(|x|^2 + eps^2). */
INLINE real l2_normalize(const real *x, real *y, long n, real eps) {
    real sum = eps * eps;
    EACH(i, n) sum += x[i] * x[i];
    real inverse = 1 / sqrt(sum);
    EACH(i, n) y[i] = x[i] * inverse;
    return inverse;
}

INLINE void l2_normalize_backward(const real *grad, const real *y, real inverse, real *out, long n) {
    real along = 0;
    EACH(i, n) along += grad[i] * y[i];
    EACH(i, n) out[i] = (grad[i] - along * y[i]) * inverse;
}

INLINE real key(const real *z, real *k, long K, real eps) {  /* eq. 8 */
    EACH(i, K) k[i] = z[i] < 0 ? 0 : z[i];
    return l2_normalize(k, k, K, eps);
}

INLINE void key_backward(const real *grad, const real *k, real inverse, real *out, long K) {
    l2_normalize_backward(grad, k, inverse, out, K);
    EACH(i, K) out[i] = k[i] > 0 ? out[i] : 0;
}

/* eq. 10; carry: 0 if `before` belongs to another document, else 1 */
INLINE void write(const real *before, real *after, const real *k, const real *v, real decay, real beta, real carry,
                  long K, long D) {
    real error[D];
    EACH(d, D) error[d] = v[d];
    for (long a = 0; a < K; a++)
        EACH(d, D) error[d] -= carry * k[a] * before[a * D + d];
    for (long a = 0; a < K; a++)
        EACH(d, D) after[a * D + d] = carry * decay * before[a * D + d] + beta * k[a] * error[d];
}

/* read = M^T q, eq. 11 */
INLINE void read_memory(const real *m, const real *q, real *read, long K, long D) {
    EACH(d, D) read[d] = 0;
    for (long a = 0; a < K; a++)
        EACH(d, D) read[d] += q[a] * m[a * D + d];
}

/* g: gradient of the memory, to which the read's share is added */
INLINE void read_backward(real *g, const real *m, const real *q, const real *grad, real *gq, long K, long D) {
    for (long a = 0; a < K; a++) {
        real sum = 0;
        EACH(d, D) g[a * D + d] += q[a] * grad[d], sum += m[a * D + d] * grad[d];
        gq[a] = sum;
    }
}

/* g: gradient of the memory after the write, updated to that before it. Returns beta's gradient;
   *glog is that of log(decay). The equations: `_delta_backward_kernel` in gpn_gpu.py. */
INLINE real write_backward(real *g, const real *before, const real *k, const real *v, real decay, real beta,
                           real carry, real *gk, real *gv, real *glog, long K, long D) {
    real error[D], gbeta = 0, g_dot_m = 0;
    EACH(d, D) error[d] = v[d], gv[d] = 0;
    for (long a = 0; a < K; a++)
        EACH(d, D) error[d] -= carry * k[a] * before[a * D + d], gv[d] += beta * k[a] * g[a * D + d];
    for (long a = 0; a < K; a++) {
        real to_key = 0, through = 0, along = 0;  /* row a of g e and of m gv; its part of <g, m> */
        EACH(d, D) {
            real m = carry * before[a * D + d], x = g[a * D + d];
            to_key += x * error[d], through += m * gv[d], along += m * x;
            g[a * D + d] = carry * (decay * x - k[a] * gv[d]);
        }
        gk[a] = beta * to_key - through, gbeta += k[a] * to_key, g_dot_m += along;
    }
    *glog = decay * g_dot_m;
    return gbeta;
}

/* 0 where a document starts, else 1 */
INLINE real carry_at(const real *carry_mask, long row) { return carry_mask ? carry_mask[row] : 1; }

/* Offset of the values in the first layer's input product; width of layer l's input product. */
INLINE long values(const sizes *n) { return n->C + 2 * n->H * n->K; }
INLINE long width(const sizes *n, long l) {
    return n->C + 2 * n->F + n->H * (n->K + n->D) + (l ? 0 : n->H * (n->K + n->D + 2));
}

/* ---- S steps ----

   s (1, B, C), k (1, B, H, K), memory (1, B, H, K, D) are updated in place, or if n->keep = 1, they
   have S + 1 entries and step t goes from entry t to t + 1 (where a document starts, s and k of entry
   t are reset). carry_mask (S, B): 0 where a document starts; active (S, B): 0 where a row is
   unchanged; may be null. saved (S, B, ...) is written. */

void steps(const sizes *n, real *const *w, real *s, real *k, real *memory, const real *u, const real *carry_mask,
           const char *active, real *const *saved) {
    const long B = n->B, C = n->C, F = n->F, H = n->H, K = n->K, D = n->D, L = n->L, Y = F + H * D;
    const real *rate = w[2 + 3 * L], *first_key = w[3 + 3 * L];
    real *scratch = malloc(sizeof(real) * B * (3 * C + 2 * Y + 1));  /* room: the last B (C + Y + 1) */
    real *ground = scratch, *normed = ground + B * C, *y = normed + B * C;
    factor *room = (factor *)(y + B * Y);
#pragma omp parallel num_threads(n->threads) if (B * C * width(n, 0) > MIN_PARALLEL)
    for (long t = 0; t < n->S; t++) {
        const real *x = ground;
        real *z0 = saved[L] + t * B * C, *s0 = s + n->keep * t * B * C, *s1 = s0 + n->keep * B * C;
        real *k0 = k + n->keep * t * B * H * K, *k1 = k0 + n->keep * B * H * K;
        real *m0 = memory + n->keep * t * B * H * K * D, *m1 = m0 + n->keep * B * H * K * D;
        SHARED(b, B) {
            if (!carry_at(carry_mask, t * B + b) && (!active || active[t * B + b])) {
                EACH(i, C) s0[b * C + i] = 0;
                EACH(i, H * K) k0[b * H * K + i] = first_key[i];
            }
            l2_normalize(s0 + b * C, normed + b * C, C, n->state_eps);
        }
        product(normed, w[0], w[1], z0, B, C, C, room);
        SHARED(b, B) {
            EACH(i, C) ground[b * C + i] = u[(t * B + b) * C + i] + sigmoid(z0[b * C + i]) * s0[b * C + i];  /* eq. 4 */
            l2_normalize(ground + b * C, normed + b * C, C, n->state_eps);
        }
        for (long l = 0; l < L; l++) {
            const long W = width(n, l);
            real *z = saved[L + 1 + 2 * l] + t * B * W;
            real *memory_read = saved[L + 2 + 2 * l] + t * B * H * D;
            real *next = saved[l] + t * B * C;
            product(normed, w[2 + 3 * l], w[3 + 3 * l], z, B, C, W, room);
            SHARED(j, B * H) {
                const long b = j / H, h = j % H;
                const real *zq = z + b * W + C + h * K, *zv = z + b * W + values(n) + h * D;
                const real *zb = z + b * W + values(n) + H * D + h;  /* beta's column; decay's is H further */
                real *m = m1 + j * K * D, *read = memory_read + j * D, q[K];
                if (l == 0 && (!active || active[t * B + b])) {
                    const real beta = beta_of(zb[0]), decay = decay_of(rate[h], zb[H]);
                    write(m0 + j * K * D, m, k0 + j * K, zv, decay, beta, carry_at(carry_mask, t * B + b), K, D);
                    key(zq + H * K, k1 + j * K, K, n->key_eps);
                } else if (l == 0) {
                    EACH(i, K * D) m[i] = m0[j * K * D + i];
                    EACH(i, K) k1[j * K + i] = k0[j * K + i];
                }
                key(zq, q, K, n->key_eps);
                read_memory(m, q, read, K, D);
            }
            SHARED(b, B) {
                const real *z1 = z + b * W + W - F - Y, *z2 = z1 + Y;
                real *out = y + b * Y;
                l2_normalize(memory_read + b * H * D, out + F, H * D, n->read_eps);
                EACH(i, F) out[i] = z1[i] * sigmoid(z1[i]) * z2[i];  /* eq. 5 */
                EACH(i, H * D) out[F + i] *= z1[F + i] * sigmoid(z1[F + i]);  /* eq. 11 */
            }
            product(y, w[4 + 3 * l], 0, next, B, Y, C, room);
            SHARED(b, B) {
                EACH(i, C) next[b * C + i] += sigmoid(z[b * W + i]) * x[b * C + i];  /* eq. 7, 11 */
                l2_normalize(next + b * C, normed + b * C, C, n->state_eps);
                const real *new = !active || active[t * B + b] ? next : s0;
                if (l == L - 1) EACH(i, C) s1[b * C + i] = new[b * C + i];
            }
            x = next;
        }
    }
    free(scratch);
}

/* ---- gradient of S steps ----

   Arguments as for `KernelSteps.backward` in gpn_gpu.py. Weights are transposed, biases null, and
   saved[L - 1] is a placeholder that is not read. ds, dk, dm are updated in place. memories (S, B, H,
   K, D): room for the memory after each step; drate (B, H) and dfirst (B, H, K) start as zeros. pairs
   (S, B, ...) is written. d: gradient of a layer's output, dx: of its input. */

void steps_backward(const sizes *n, real *const *w, long is_cut, const real *u, const real *carry_mask, const real *s,
                    const real *k, const real *memory, const real *grad, real *ds, real *dk, real *dm,
                    real *const *saved, real *memories, real *du, real *drate, real *dfirst, real *const *pairs) {
    const long S = n->S, B = n->B, C = n->C, F = n->F, H = n->H, K = n->K, D = n->D, L = n->L;
    const long Y = F + H * D, M = B * H * K * D;
    const real *rate = w[2 + 3 * L], *first_key = w[3 + 3 * L];
    /* room: the last B (width(n, 0) + 1) */
    real *scratch = malloc(sizeof(real) * B * (2 * C + 2 * width(n, 0) + Y + 2 + S * H * K));
    real *state = scratch, *ground = state + B * C, *cut = ground + B * C, *dy = cut + B * width(n, 0);
    real *inverses = dy + B * Y, *keys = inverses + B;  /* keys: the key of each step's write */
    factor *room = (factor *)(keys + S * B * H * K);
#pragma omp parallel num_threads(n->threads) if (B * C * width(n, 0) > MIN_PARALLEL)
    {
        SHARED(j, B * H)
            for (long t = 0; t < S; t++) {
                const long b = j / H, h = j % H;
                const real carry = carry_at(carry_mask, t * B + b);
                const real *z = saved[L + 1] + (t * B + b) * width(n, 0), *zb = z + values(n) + H * D + h;
                real *used = keys + (t * B * H + j) * K;
                if (!carry) EACH(i, K) used[i] = first_key[h * K + i];
                else if (t == 0) EACH(i, K) used[i] = k[j * K + i];
                else key(z - B * width(n, 0) + C + (H + h) * K, used, K, n->key_eps);  /* made at t - 1 */
                const real *before = t ? memories + (t - 1) * M : memory;
                const real beta = beta_of(zb[0]), decay = decay_of(rate[h], zb[H]);
                write(before + j * K * D, memories + t * M + j * K * D, used, z + values(n) + h * D, decay, beta, carry,
                      K, D);
            }
        for (long t = S - 1; t >= 0; t--) {
            const real *z0 = saved[L] + t * B * C;
            real *dz0 = pairs[0] + t * B * C, *n0 = pairs[1] + t * B * C;
            real *dground = du + t * B * C;  /* eq. 4 adds u, so the grounded state's gradient is u's */
            SHARED(b, B) {
                const long row = b * C, at = t * B * C + row;
                const real carry = carry_at(carry_mask, t * B + b);
                EACH(i, C) {
                    state[row + i] = carry * s[at + i];
                    ground[row + i] = u[at + i] + sigmoid(z0[row + i]) * state[row + i];  /* eq. 4 */
                    pairs[4 * L][at + i] = ds[row + i] + grad[at + i];  /* dout of the last layer */
                }
            }
            for (long l = L - 1; l >= 0; l--) {
                const long W = width(n, l), ends = is_cut && t == S - 1 && l == 0;
                const real *z = saved[L + 1 + 2 * l] + t * B * W;
                const real *memory_read = saved[L + 2 + 2 * l] + t * B * H * D;
                const real *x = l ? saved[l - 1] + t * B * C : ground, *d = pairs[4 + 4 * l] + t * B * C;
                real *dz = pairs[2 + 4 * l] + t * B * W, *normed = pairs[3 + 4 * l] + t * B * C;
                real *y = pairs[5 + 4 * l] + t * B * Y;
                real *dx = l ? pairs[4 * l] + t * B * C : dground;
                product(d, w[4 + 3 * l], 0, dy, B, C, Y, room);
                SHARED(b, B) {
                    const real *z1 = z + b * W + W - F - Y, *z2 = z1 + Y;
                    real *dz1 = dz + b * W + W - F - Y, *dz2 = dz1 + Y;
                    real other[Y], *dother = dy + b * Y;  /* overwrites dy; ends as the read's gradient, from F on */
                    const real inverse = l2_normalize(memory_read + b * H * D, other + F, H * D, n->read_eps);
                    EACH(i, F) other[i] = z2[i];
                    EACH(i, Y) {
                        const real gate = sigmoid(z1[i]), gated = z1[i] * gate, g = dother[i];
                        y[b * Y + i] = gated * other[i];
                        dz1[i] = g * other[i] * gate * (1 + z1[i] - gated);  /* eq. 5, 11 */
                        dother[i] = g * gated;
                    }
                    EACH(i, F) dz2[i] = dother[i];
                    l2_normalize_backward(dother + F, other + F, inverse, dother + F, H * D);
                    EACH(i, C) {
                        real gate = sigmoid(z[b * W + i]);
                        dz[b * W + i] = d[b * C + i] * x[b * C + i] * gate * (1 - gate);  /* eq. 7 */
                    }
                    inverses[b] = l2_normalize(x + b * C, normed + b * C, C, n->state_eps);
                }
                SHARED(j, B * H) {
                    const long b = j / H, h = j % H, query = b * W + C + h * K, value = b * W + values(n) + h * D;
                    const long write_gate = b * W + values(n) + H * D + h, decay_gate = write_gate + H;
                    real *g = dm + j * K * D, normalized_key[K], dkey[K];
                    real inverse = key(z + query, normalized_key, K, n->key_eps);
                    read_backward(g, memories + t * M + j * K * D, normalized_key, dy + b * Y + F + h * D, dkey, K, D);
                    key_backward(dkey, normalized_key, inverse, dz + query, K);
                    if (l == 0) {
                        const real carry = carry_at(carry_mask, t * B + b);
                        const real beta = beta_of(z[write_gate]), a = z[decay_gate], decay = decay_of(rate[h], a);
                        real dlog;
                        inverse = key(z + query + H * K, normalized_key, K, n->key_eps);
                        key_backward(dk + j * K, normalized_key, inverse, dz + query + H * K, K);
                        /* dk was the gradient of the next key; from here it is that of the key used in this write */
                        const real *before = (t ? memories + (t - 1) * M : memory) + j * K * D;
                        const real dbeta = write_backward(g, before, keys + (t * B * H + j) * K, z + value, decay, beta,
                                                          carry, dk + j * K, dz + value, &dlog, K, D);
                        dz[write_gate] = beta * (1 - beta) * dbeta;
                        dz[decay_gate] = -rate[h] * sigmoid(a) * dlog;
                        drate[j] -= softplus(a) * dlog;
                        if (!carry) EACH(i, K) dfirst[j * K + i] += dk[j * K + i], dk[j * K + i] = 0;
                    }
                }
                if (ends)  /* truncated BPTT: only the key's weights get its gradient */
                    SHARED(b, B) {
                        EACH(i, W) cut[b * W + i] = dz[b * W + i];
                        EACH(i, H * K) cut[b * W + C + H * K + i] = 0;
                    }
                product(ends ? cut : dz, w[2 + 3 * l], 0, dx, B, W, C, room);
                SHARED(b, B) {
                    l2_normalize_backward(dx + b * C, normed + b * C, inverses[b], dx + b * C, C);
                    EACH(i, C) dx[b * C + i] += d[b * C + i] * sigmoid(z[b * W + i]);  /* eq. 7 */
                }
            }
            SHARED(b, B) EACH(i, C) {
                const long at = b * C + i;
                const real gate = sigmoid(z0[at]);
                dz0[at] = dground[at] * state[at] * gate * (1 - gate);  /* eq. 4 */
            }
            product(dz0, w[0], 0, ds, B, C, C, room);  /* ds of this step was read at its start */
            SHARED(b, B) {
                const long row = b * C;
                const real carry = carry_at(carry_mask, t * B + b);
                const real inverse = l2_normalize(state + row, n0 + row, C, n->state_eps);
                l2_normalize_backward(ds + row, n0 + row, inverse, ds + row, C);
                EACH(i, C) ds[row + i] = carry * (ds[row + i] + dground[row + i] * sigmoid(z0[row + i]));  /* eq. 4 */
            }
        }
    }
    free(scratch);
}
