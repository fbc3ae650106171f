#include <stdlib.h>
#include <tgmath.h>

#ifdef DOUBLE
typedef double real;
typedef long whole;
enum { LARGEST = 708, TERMS = 13, BIAS = 1023, MANTISSA = 52 };
#else
typedef float real;
typedef int whole;
enum { LARGEST = 87, TERMS = 7, BIAS = 127, MANTISSA = 23 };
#endif

#ifdef __AVX512F__
enum { BYTES = 64, ROWS = 8 };  /* of a vector; of a tile, which with two vectors a row stays in registers */
#elif defined __AVX__
enum { BYTES = 32, ROWS = 4 };
#else
enum { BYTES = 16, ROWS = 4 };
#endif
enum { LANES = BYTES / sizeof(real), PANEL = 2 * LANES, WORTH_THREADS = 1 << 18 /* multiplications of a product */ };
typedef real vector __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
typedef struct { long S, B, C, F, H, K, D, L; real state_eps, answer_eps, key_eps; } sizes;

#define EACH(i, n) _Pragma("GCC ivdep") for (long i = 0; i < (n); i++)  /* where two arrays may be one, only equal places meet */
#define SHARED(i, n) _Pragma("omp for") for (long i = 0; i < (n); i++)  /* by all threads, which then wait for each other */
#define INLINE static inline __attribute__((always_inline))

const int panel = PANEL;

/* ---- y (B, n) = x (B, c) W^T + bias; W in panels (ceil(n / PANEL), c, PANEL) ---- */

INLINE void tile(const int R, const real *x, const real *w, const real *bias, real *y, long c, long n, long columns) {
    vector sum[ROWS][2];
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = (vector){0};
    for (long i = 0; i < c; i++) {
        vector left = *(vector *)(w + i * PANEL), right = *(vector *)(w + i * PANEL + LANES);
        for (int r = 0; r < R; r++) sum[r][0] += x[r * c + i] * left, sum[r][1] += x[r * c + i] * right;
    }
    for (int r = 0; r < R; r++)
        EACH(j, columns) y[r * n + j] = ((real *)sum[r])[j] + (bias ? bias[j] : 0);
}

static void product(const real *x, const real *w, const real *bias, real *y, long B, long c, long n) {
    SHARED(p, (n + PANEL - 1) / PANEL) {
        long j = p * PANEL, b = 0, columns = n - j < PANEL ? n - j : PANEL;
        const real *some = bias ? bias + j : 0;
        for (; b + ROWS <= B; b += ROWS) tile(ROWS, x + b * c, w + j * c, some, y + b * n + j, c, n, columns);
        for (; b < B; b++) tile(1, x + b * c, w + j * c, some, y + b * n + j, c, n, columns);
    }
}

/* ---- pieces of a step ---- */

INLINE real exponential(real x) {  /* exp(x) in operations that a compiler makes vectors of: 2^n exp(r), |r| < 0.35, by its series */
    x = x < -LARGEST ? -LARGEST : x > LARGEST ? LARGEST : x;
    real n = rint(x * (real)1.4426950408889634), r = x - n * (real)0.6931471805599453, sum = 1;
    for (int i = TERMS; i > 0; i--) sum = 1 + sum * r * (1 / (real)i);
    union { whole bits; real number; } scale = {((whole)n + BIAS) << MANTISSA};
    return sum * scale.number;
}
INLINE real sigmoid(real x) { return 1 / (1 + exponential(-x)); }
INLINE real softplus(real x) { return x > 20 ? x : log1p(exp(x)); }

INLINE real unit(const real *x, real *y, long n, real eps) {  /* y = x / sqrt(|x|^2 + eps^2); returns 1 / the root */
    real sum = eps * eps;
    EACH(i, n) sum += x[i] * x[i];
    real inverse = 1 / sqrt(sum);
    EACH(i, n) y[i] = x[i] * inverse;
    return inverse;
}

INLINE void unit_gradient(const real *grad, const real *y, real inverse, real *out, long n) {
    real along = 0;
    EACH(i, n) along += grad[i] * y[i];
    EACH(i, n) out[i] = (grad[i] - along * y[i]) * inverse;
}

INLINE real key(const real *z, real *k, long K, real eps) {  /* eq. 8 */
    EACH(i, K) k[i] = z[i] < 0 ? 0 : z[i];
    return unit(k, k, K, eps);
}

INLINE void key_gradient(const real *grad, const real *k, real inverse, real *out, long K) {
    unit_gradient(grad, k, inverse, out, K);
    EACH(i, K) out[i] = k[i] > 0 ? out[i] : 0;
}

INLINE void write(const real *before, real *after, const real *k, const real *v, real decay, real beta, real kept, long K, long D) {  /* eq. 10 */
    real error[D];
    EACH(d, D) error[d] = v[d];
    for (long a = 0; a < K; a++)
        EACH(d, D) error[d] -= kept * k[a] * before[a * D + d];
    for (long a = 0; a < K; a++)
        EACH(d, D) after[a * D + d] = kept * decay * before[a * D + d] + beta * k[a] * error[d];
}

INLINE void read_gradient(real *g, const real *m, const real *q, const real *grad, real *gq, long K, long D) {
    for (long a = 0; a < K; a++) {
        real sum = 0;
        EACH(d, D) g[a * D + d] += q[a] * grad[d], sum += m[a * D + d] * grad[d];
        gq[a] = sum;
    }
}

/* g: of the memory after it, then of the one before; returns the gradient of beta, in *glog that of log(decay) */
INLINE real write_gradient(real *g, const real *before, const real *k, const real *v, real decay, real beta, real kept, real *gk, real *gv,
                           real *glog, long K, long D) {
    real error[D], gbeta = 0, held = 0;
    EACH(d, D) error[d] = v[d], gv[d] = 0;
    for (long a = 0; a < K; a++)
        EACH(d, D) error[d] -= kept * k[a] * before[a * D + d], gv[d] += beta * k[a] * g[a * D + d];
    for (long a = 0; a < K; a++) {
        real to_key = 0, through = 0, along = 0;
        EACH(d, D) {
            real m = kept * before[a * D + d], x = g[a * D + d];
            to_key += x * error[d], through += m * gv[d], along += m * x;
            g[a * D + d] = kept * (decay * x - k[a] * gv[d]);
        }
        gk[a] = beta * to_key - through, gbeta += k[a] * to_key, held += along;
    }
    *glog = decay * held;
    return gbeta;
}

INLINE real goes_on(const real *keep, long row) { return keep ? keep[row] : 1; }  /* 0 where a document starts */

/* Columns of a layer's product in: gate C | query HK | if it writes: key HK, value HD, beta H, decay H | silu'd F + HD | up F. */
INLINE long values(const sizes *n) { return n->C + 2 * n->H * n->K; }
INLINE long width(const sizes *n, long l) {
    return n->C + 2 * n->F + n->H * (n->K + n->D) + (l ? 0 : n->H * (n->K + n->D + 2));
}

/* ---- S steps ----
   w: of the ground's gate weight and bias, of each layer the weight and bias of its product in, the weight of its product out; then the
   decay rates and the first key. s (B, C), k (B, H, K), memory (B, H, K, D) in place. keep (S, B), 0 where a document starts; active (S, B),
   0 in rows that stay as they are; or null. kept (S, B, ...): states of the layers, the ground's product, of each layer the product in
   and, with a memory, the answer. */

void steps(const sizes *n, real *const *w, real *s, real *k, real *memory, const real *u, const real *keep, const char *active,
           real *const *kept) {
    const long B = n->B, C = n->C, F = n->F, H = n->H, K = n->K, D = n->D, L = n->L, Y = F + H * D;
    const real *rate = w[2 + 3 * L], *first_key = w[3 + 3 * L];
    real *room = malloc(sizeof(real) * B * (3 * C + Y)), *ground = room, *normed = ground + B * C, *sum = normed + B * C, *y = sum + B * C;
#pragma omp parallel if (B * C * width(n, 0) > WORTH_THREADS)
    for (long t = 0; t < n->S; t++) {
        const real *x = ground;
        real *z0 = kept[L] + t * B * C;
        SHARED(b, B) {
            if (!goes_on(keep, t * B + b) && (!active || active[t * B + b])) {
                EACH(i, C) s[b * C + i] = 0;
                EACH(i, H * K) k[b * H * K + i] = first_key[i];
            }
            unit(s + b * C, normed + b * C, C, n->state_eps);
        }
        product(normed, w[0], w[1], z0, B, C, C);
        SHARED(b, B) {
            EACH(i, C) ground[b * C + i] = u[(t * B + b) * C + i] + sigmoid(z0[b * C + i]) * s[b * C + i];  /* eq. 4 */
            unit(ground + b * C, normed + b * C, C, n->state_eps);
        }
        for (long l = 0; l < L; l++) {
            const long W = width(n, l);
            real *z = kept[L + 1 + l * (H ? 2 : 1)] + t * B * W, *answer = H ? kept[L + 2 + 2 * l] + t * B * H * D : 0;
            real *next = kept[l] + t * B * C;
            product(normed, w[2 + 3 * l], w[3 + 3 * l], z, B, C, W);
            SHARED(j, B * H) {
                const long b = j / H, h = j % H;
                const real *zq = z + b * W + C + h * K, *zv = z + b * W + values(n) + h * D, *zb = z + b * W + values(n) + H * D + h;
                real *m = memory + j * K * D, *read = answer + j * D, q[K];
                if (l == 0 && (!active || active[t * B + b])) {
                    write(m, m, k + j * K, zv, exponential(-rate[h] * softplus(zb[H])), sigmoid(*zb), goes_on(keep, t * B + b), K, D);
                    key(zq + H * K, k + j * K, K, n->key_eps);
                }
                key(zq, q, K, n->key_eps);
                EACH(d, D) read[d] = 0;
                for (long a = 0; a < K; a++)
                    EACH(d, D) read[d] += q[a] * m[a * D + d];
            }
            SHARED(b, B) {
                const real *silu = z + b * W + W - F - Y, *up = silu + Y;
                real *out = y + b * Y;
                unit(answer + b * H * D, out + F, H * D, n->answer_eps);
                EACH(i, F) out[i] = silu[i] * sigmoid(silu[i]) * up[i];
                EACH(i, H * D) out[F + i] *= silu[F + i] * sigmoid(silu[F + i]);
            }
            product(y, w[4 + 3 * l], 0, sum, B, Y, C);
            SHARED(b, B) {
                EACH(i, C) next[b * C + i] = sum[b * C + i] + sigmoid(z[b * W + i]) * x[b * C + i];  /* eq. 7, 11 */
                unit(next + b * C, normed + b * C, C, n->state_eps);
                if (l == L - 1 && (!active || active[t * B + b]))
                    EACH(i, C) s[b * C + i] = next[b * C + i];
            }
            x = next;
        }
    }
    free(room);
}

/* ---- and their gradient ----
   As `segment_gradient` of model_gpn.py, which names the arguments; weights transposed, ds, dk, dm in place. memories (S, B, H, K, D) is
   room for the memory after each step; drate (B, H) and dfirst (B, H, K) start as zeros. pairs (S, B, ...): of the ground's product, then
   of each layer's products in and out, the gradient of the result and what was multiplied. */

void gradient(const sizes *n, real *const *w, long cut_end, const real *u, const real *keep, const real *s, const real *k, const real *memory,
              const real *grad, real *ds, real *dk, real *dm, real *const *kept, real *memories, real *du, real *drate, real *dfirst,
              real *const *pairs) {
    const long S = n->S, B = n->B, C = n->C, F = n->F, H = n->H, K = n->K, D = n->D, L = n->L, Y = F + H * D, M = B * H * K * D;
    const real *rate = w[2 + 3 * L], *first_key = w[3 + 3 * L];
    real *room = malloc(sizeof(real) * B * (3 * C + width(n, 0) + Y + H * D + 1 + S * H * K)), *state = room, *ground = state + B * C;
    real *back = ground + B * C, *cut = back + B * C, *dy = cut + B * width(n, 0), *danswer = dy + B * Y, *inverse = danswer + B * H * D;
    real *keys = inverse + B;  /* that each step writes under */
#pragma omp parallel if (B * C * width(n, 0) > WORTH_THREADS)
    {
        SHARED(j, B * H)
            for (long t = 0; t < S; t++) {
                const long b = j / H, h = j % H;
                const real on = goes_on(keep, t * B + b), *z = kept[L + 1] + (t * B + b) * width(n, 0), *zb = z + values(n) + H * D + h;
                real *used = keys + (t * B * H + j) * K;
                if (!on) EACH(i, K) used[i] = first_key[h * K + i];
                else if (t == 0) EACH(i, K) used[i] = k[j * K + i];
                else key(z - B * width(n, 0) + C + (H + h) * K, used, K, n->key_eps);
                write((t ? memories + (t - 1) * M : memory) + j * K * D, memories + t * M + j * K * D, used, z + values(n) + h * D,
                      exponential(-rate[h] * softplus(zb[H])), sigmoid(*zb), on, K, D);
            }
        for (long t = S - 1; t >= 0; t--) {
            const real *z0 = kept[L] + t * B * C;
            real *dz0 = pairs[0] + t * B * C, *n0 = pairs[1] + t * B * C, *dground = du + t * B * C;
            SHARED(b, B) {
                const long row = b * C, at = t * B * C + row;
                const real on = goes_on(keep, t * B + b);
                EACH(i, C) {
                    state[row + i] = on * s[at + i];
                    ground[row + i] = u[at + i] + sigmoid(z0[row + i]) * state[row + i];
                    pairs[4 * L][at + i] = ds[row + i] + grad[at + i];
                }
            }
            for (long l = L - 1; l >= 0; l--) {
                const long W = width(n, l), ends = cut_end && t == S - 1 && l == 0;
                const real *z = kept[L + 1 + l * (H ? 2 : 1)] + t * B * W, *answer = H ? kept[L + 2 + 2 * l] + t * B * H * D : 0;
                const real *x = l ? kept[l - 1] + t * B * C : ground, *d = pairs[4 + 4 * l] + t * B * C;
                real *dz = pairs[2 + 4 * l] + t * B * W, *normed = pairs[3 + 4 * l] + t * B * C, *y = pairs[5 + 4 * l] + t * B * Y;
                real *dx = l ? pairs[4 * l] + t * B * C : dground;
                product(d, w[4 + 3 * l], 0, dy, B, C, Y);
                SHARED(b, B) {
                    const long silu = b * W + W - F - Y, up = silu + Y;
                    real other[Y], dother[Y], length = unit(answer + b * H * D, other + F, H * D, n->answer_eps);
                    EACH(i, F) other[i] = z[up + i];
                    EACH(i, Y) {
                        real half = sigmoid(z[silu + i]), whole = z[silu + i] * half;
                        y[b * Y + i] = whole * other[i];
                        dz[silu + i] = dy[b * Y + i] * other[i] * half * (1 + z[silu + i] - whole);
                        dother[i] = dy[b * Y + i] * whole;
                    }
                    EACH(i, F) dz[up + i] = dother[i];
                    unit_gradient(dother + F, other + F, length, danswer + b * H * D, H * D);
                    EACH(i, C) {
                        real gate = sigmoid(z[b * W + i]);
                        dz[b * W + i] = d[b * C + i] * x[b * C + i] * gate * (1 - gate);
                    }
                    inverse[b] = unit(x + b * C, normed + b * C, C, n->state_eps);
                }
                SHARED(j, B * H) {
                    const long b = j / H, h = j % H, query = b * W + C + h * K, value = b * W + values(n) + h * D;
                    const long write_gate = b * W + values(n) + H * D + h, decay_gate = write_gate + H;
                    real *g = dm + j * K * D, unit_key[K], dkey[K], length = key(z + query, unit_key, K, n->key_eps);
                    read_gradient(g, memories + t * M + j * K * D, unit_key, danswer + j * D, dkey, K, D);
                    key_gradient(dkey, unit_key, length, dz + query, K);
                    if (l == 0) {
                        const real on = goes_on(keep, t * B + b), beta = sigmoid(z[write_gate]), soft = softplus(z[decay_gate]);
                        real dlog;
                        length = key(z + query + H * K, unit_key, K, n->key_eps);
                        key_gradient(dk + j * K, unit_key, length, dz + query + H * K, K);
                        dz[write_gate] = beta * (1 - beta) * write_gradient(
                            g, (t ? memories + (t - 1) * M : memory) + j * K * D, keys + (t * B * H + j) * K, z + value,
                            exponential(-rate[h] * soft), beta, on, dk + j * K, dz + value, &dlog, K, D);
                        dz[decay_gate] = -rate[h] * sigmoid(z[decay_gate]) * dlog;
                        drate[j] -= soft * dlog;
                        if (!on) EACH(i, K) dfirst[j * K + i] += dk[j * K + i], dk[j * K + i] = 0;
                    }
                }
                if (ends)  /* the key's gradient reaches its weights, and no further */
                    SHARED(b, B) {
                        EACH(i, W) cut[b * W + i] = dz[b * W + i];
                        EACH(i, H * K) cut[b * W + C + H * K + i] = 0;
                    }
                product(ends ? cut : dz, w[2 + 3 * l], 0, back, B, W, C);
                SHARED(b, B) {
                    unit_gradient(back + b * C, normed + b * C, inverse[b], dx + b * C, C);
                    EACH(i, C) dx[b * C + i] += d[b * C + i] * sigmoid(z[b * W + i]);
                }
            }
            SHARED(b, B) EACH(i, C) {
                const long at = b * C + i;
                const real gate = sigmoid(z0[at]);
                dz0[at] = dground[at] * state[at] * gate * (1 - gate);
            }
            product(dz0, w[0], 0, back, B, C, C);
            SHARED(b, B) {
                const long row = b * C;
                const real on = goes_on(keep, t * B + b), length = unit(state + row, n0 + row, C, n->state_eps);
                unit_gradient(back + row, n0 + row, length, ds + row, C);
                EACH(i, C) ds[row + i] = on * (ds[row + i] + dground[row + i] * sigmoid(z0[row + i]));
            }
        }
    }
    free(room);
}
