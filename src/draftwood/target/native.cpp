// A decoder layer of the Llama shape for a few rows on a CPU, in float32. Compiled when a target is
// loaded (native.py), with the width of vectors that the machine has.
//
// A product of a few rows is bound by reading the weights. They are packed in panels of NR outputs,
// [out / NR][in][NR], so that one pass over memory, front to back, serves all rows; while a panel
// is used, the next part of it is fetched. Every output is one sum over its inputs in order,
// whatever the number of rows or threads.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <omp.h>

#if defined(__AVX512F__)
constexpr int VL = 16, MR = 8;  // floats per vector, rows at a time
#elif defined(__AVX2__)
constexpr int VL = 8, MR = 4;
#else
constexpr int VL = 4, MR = 4;
#endif
constexpr int NV = 3, NR = NV * VL;  // MR · NV sums, NV weights and one input fit the registers
constexpr int KB = 64;               // inputs at a time: their rows stay in the first cache
constexpr int MAX_ROWS = 32;  // sums, rows and weights of a block stay in the first cache
constexpr int BK = 64, MAX_D = 256, MAX_R = 48;  // keys at a time, head size, query rows at a time

namespace {  // nothing here may be shared with another build of it in the same process

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int vi __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4)));
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE void store(float *p, vf v) { *(vfu *)p = v; }
INLINE vf splat(float x) { return x - (vf){}; }
INLINE float sum_of(vf v) {
  float s = 0;
  UNROLL for (int i = 0; i < VL; i++) s += v[i];
  return s;
}
INLINE float max_of(vf v) {
  float s = v[0];
  UNROLL for (int i = 1; i < VL; i++) s = v[i] > s ? v[i] : s;
  return s;
}
static inline long share(long total, long thread, long threads) { return total * thread / threads; }
static inline long panels(long outputs) { return (outputs + NR - 1) / NR; }
static inline long least(long a, long b) { return a < b ? a : b; }

// ---- products ------------------------------------------------------------------------------

// acc[M][NR] += x[M][kb] · w[kb][NR]; PREFETCH lines of `next` per two inputs
template <int M, int PREFETCH>
INLINE void micro(const float *w, const float *x, long kb, long x_row, float *acc, bool first,
                  const char *next) {
  vf a[M][NV];
  const float *row[M];
  UNROLL for (int i = 0; i < M; i++) row[i] = x + i * x_row;
  if (first)
    UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < NV; j++) a[i][j] = (vf){};
  else
    UNROLL for (int i = 0; i < M; i++)
      UNROLL for (int j = 0; j < NV; j++) a[i][j] = *(vf *)(acc + NR * i + VL * j);
  long k = 0;
  for (; k + 2 <= kb; k += 2, w += 2 * NR, next += 64 * PREFETCH) {
    UNROLL for (int p = 0; p < PREFETCH; p++) __builtin_prefetch(next + 64 * p, 0, 3);
    UNROLL for (int u = 0; u < 2; u++) {
      vf ww[NV];
      UNROLL for (int j = 0; j < NV; j++) ww[j] = *(const vf *)(w + NR * u + VL * j);
      UNROLL for (int i = 0; i < M; i++) {
        float b = row[i][k + u];
        UNROLL for (int j = 0; j < NV; j++) a[i][j] += ww[j] * b;
      }
    }
  }
  for (; k < kb; k++, w += NR)
    UNROLL for (int i = 0; i < M; i++) {
      float b = row[i][k];
      UNROLL for (int j = 0; j < NV; j++) a[i][j] += *(const vf *)(w + VL * j) * b;
    }
  UNROLL for (int i = 0; i < M; i++)
    UNROLL for (int j = 0; j < NV; j++) *(vf *)(acc + NR * i + VL * j) = a[i][j];
}

// One block of inputs for n rows in `passes` groups; the first groups fetch what comes next.
template <int PREFETCH>
static void block(const float *w, const float *x, long n, long kb, float *acc, bool first,
                  long passes) {
  const char *next = (const char *)(w + KB * NR);
  for (long r = 0, left = passes; left > 0; left--) {
    long m = (n - r + left - 1) / left;
    bool fetch = passes - left < 3;
    const float *xr = x + r * KB;
    float *ar = acc + NR * r;
    switch (m) {
#define ROWS(M)                                                        \
  case M:                                                              \
    if (fetch) micro<M, PREFETCH>(w, xr, kb, KB, ar, first, next);     \
    else micro<M, 0>(w, xr, kb, KB, ar, first, next);                  \
    break;
      ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if defined(__AVX512F__)
      ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#endif
    }
    next += kb / 2 * PREFETCH * 64;
    r += m;
  }
}

// acc[n][NR] = x · panel, for n ≤ MAX_ROWS packed rows
static void panel(const float *w, const float *x, long n, long K, float *acc) {
  if (n == 1) return micro<1, 0>(w, x, K, K, acc, true, nullptr);
  long passes = (n + MR - 1) / MR;
  for (long k = 0; k < K; k += KB) {
    long kb = least(KB, K - k);
    const float *wk = w + k * NR, *xk = x + k * n;
    if (passes == 1) block<3>(wk, xk, n, kb, acc, k == 0, passes);
    else if (passes == 2) block<2>(wk, xk, n, kb, acc, k == 0, passes);
    else block<1>(wk, xk, n, kb, acc, k == 0, passes);
  }
}

// This thread's copy of rows x[n][K]: blocks of KB columns, the rows of a block below each other.
struct Packed {
  const float *x;
  long row;  // floats per row, whole blocks
  Packed(const float *rows, long n, long K) {
    static thread_local float *buffer;
    static thread_local long size;
    row = (K + KB - 1) / KB * KB;
    if (size < n * row) {
      free(buffer);
      size = n * row;
      buffer = (float *)aligned_alloc(64, size * 4);
    }
    for (long r = 0; r < n; r += MAX_ROWS) {
      long m = least(MAX_ROWS, n - r);
      for (long k = 0; k < K; k += KB)
        for (long i = 0; i < m; i++)
          memcpy(buffer + r * row + k * m + i * KB, rows + (r + i) * K + k, least(KB, K - k) * 4);
    }
    x = buffer;
  }
};

struct Linear {
  const float *w, *bias;
  long K, O;
};

// y[n][O] (+)= x · Wᵀ + bias, for panels a … b
static void linear(const Linear &l, const float *x, float *y, long n, bool add, long a, long b) {
  alignas(64) float acc[MAX_ROWS * NR];
  Packed rows(x, n, l.K);
  for (long p = a; p < b; p++) {
    int count = least(NR, l.O - p * NR);
    for (long r = 0; r < n; r += MAX_ROWS) {
      long m = least(MAX_ROWS, n - r);
      panel(l.w + p * l.K * NR, rows.x + r * rows.row, m, l.K, acc);
      for (long i = 0; i < m; i++) {
        float *from = acc + NR * i, *to = y + (r + i) * l.O + p * NR;
        if (l.bias) for (int j = 0; j < count; j++) from[j] += l.bias[p * NR + j];
        if (add) for (int j = 0; j < count; j++) to[j] += from[j];
        else memcpy(to, from, count * 4);
      }
    }
  }
}

// ---- row by row ----------------------------------------------------------------------------

INLINE void rms_norm(const float *x, const float *w, float eps, long H, float *y) {
  float s = 0;
  vf a = {}, b = {};
  long i = 0;
  for (; i + 2 * VL <= H; i += 2 * VL) {
    vf u = load(x + i), v = load(x + i + VL);
    a += u * u;
    b += v * v;
  }
  for (; i < H; i++) s += x[i] * x[i];
  s += sum_of(a + b);
  float r = 1.0f / sqrtf(s / H + eps);
  for (i = 0; i < H; i++) y[i] = w[i] * (x[i] * r);
}

INLINE vf exp_of(vf x) {  // Cephes' expf, 1 to 2 units in the last place
  x = x < splat(-87.f) ? splat(-87.f) : x;
  x = x > splat(88.f) ? splat(88.f) : x;
  vf z = x * 1.44269504088896341f, half = z < (vf){} ? splat(-.5f) : splat(.5f);
  vi n = __builtin_convertvector(z + half, vi);
  vf f = __builtin_convertvector(n, vf);
  x -= f * 0.693359375f;
  x -= f * -2.12194440e-4f;
  vf y = splat(1.9875691500E-4f);
  y = y * x + 1.3981999507E-3f;
  y = y * x + 8.3334519073E-3f;
  y = y * x + 4.1665795894E-2f;
  y = y * x + 1.6666665459E-1f;
  y = y * x + 5.0000001201E-1f;
  y = y * x * x + x + 1.f;
  vi e = (n + 127) << 23;
  return y * (vf)e;
}

// ---- attention -----------------------------------------------------------------------------

// Rows start … start + n of one sequence over its L keys [kv_heads][L][D], given by strides.
struct View {
  const float *K, *V;
  long k_head, k_row, v_head, v_row;
  const float *mask;  // [n][L], rows mask_row apart, or null
  long mask_row, start, n, L, causal;
  float *new_K, *new_V;  // where dw_stack puts the rows' own keys and values
};

// R query rows over the keys of one head, BK keys at a time with a running maximum.
static void attend(const float **q, float **out, const float **mask, const long *limit, int R,
                   const float *K, long k_row, const float *V, long v_row, long L, int D,
                   float scale) {
  alignas(64) float S[MAX_R][BK], O[MAX_R][MAX_D], KT[MAX_D * BK];
  float top[MAX_R], sum[MAX_R];
  for (int r = 0; r < R; r++) {
    top[r] = -INFINITY;
    sum[r] = 0;
    memset(O[r], 0, D * 4);
  }
  for (long k0 = 0; k0 < L; k0 += BK) {
    int nk = least(BK, L - k0);
    const float *Kb = K + k0 * k_row, *Vb = V + k0 * v_row;
    if (R >= 6) {  // turning the keys round pays
      for (int j = 0; j < BK; j++)
        for (int d = 0; d < D; d++) KT[d * BK + j] = j < nk ? Kb[j * k_row + d] : 0.f;
      for (int r = 0; r < R; r += 3) {
        int m = least(3, R - r);
        const float *q0 = q[r], *q1 = q[r + (m > 1)], *q2 = q[r + (m > 2 ? 2 : m > 1)];
        for (int j = 0; j < BK; j += 4 * VL) {
          vf a[3][4];
          UNROLL for (int i = 0; i < 3; i++) UNROLL for (int t = 0; t < 4; t++) a[i][t] = (vf){};
          for (int d = 0; d < D; d++) {
            UNROLL for (int t = 0; t < 4; t++) {
              vf w = *(vf *)(KT + d * BK + j + VL * t);
              a[0][t] += w * q0[d];
              a[1][t] += w * q1[d];
              a[2][t] += w * q2[d];
            }
          }
          for (int i = 0; i < m; i++)
            UNROLL for (int t = 0; t < 4; t++) *(vf *)(&S[r + i][j + VL * t]) = a[i][t] * scale;
        }
      }
    } else {
      for (int r = 0; r < R; r++)
        for (int j = 0; j < nk; j++) {
          vf a = {};
          for (int d = 0; d < D; d += VL) a += load(q[r] + d) * load(Kb + j * k_row + d);
          S[r][j] = sum_of(a) * scale;
        }
    }
    for (int r = 0; r < R; r++) {
      float *s = S[r];
      if (mask[r]) for (int j = 0; j < nk; j++) s[j] += mask[r][k0 + j];
      for (int j = limit[r] > k0 ? least(nk, limit[r] - k0) : 0; j < BK; j++) s[j] = -INFINITY;
      vf best = load(s);
      for (int j = VL; j < BK; j += VL) best = load(s + j) > best ? load(s + j) : best;
      float highest = max_of(best);
      if (highest < top[r]) highest = top[r];
      if (highest == -INFINITY) {
        for (int j = 0; j < BK; j++) s[j] = 0;
        continue;
      }
      if (highest > top[r]) {
        float c = top[r] == -INFINITY ? 0.f : exp_of(splat(top[r] - highest))[0];
        sum[r] *= c;
        for (int d = 0; d < D; d++) O[r][d] *= c;
        top[r] = highest;
      }
      vf total = {};
      for (int j = 0; j < BK; j += VL) {
        vf v = load(s + j), e = exp_of(v - highest);
        e = v == splat(-INFINITY) ? (vf){} : e;
        store(s + j, e);
        total += e;
      }
      sum[r] += sum_of(total);
    }
    for (int r = 0; r < R; r += 2)
      for (int d = 0; d < D; d += 4 * VL) {
        int r1 = r + (r + 1 < R), nv = least(4, (D - d) / VL);
        vf a[2][4];
        for (int t = 0; t < nv; t++) a[0][t] = load(&O[r][d + VL * t]), a[1][t] = load(&O[r1][d + VL * t]);
        if (nv == 4) {
          for (int j = 0; j < nk; j++)
            UNROLL for (int t = 0; t < 4; t++) {
              vf w = load(Vb + j * v_row + d + VL * t);
              a[0][t] += w * S[r][j];
              a[1][t] += w * S[r1][j];
            }
        } else {
          for (int j = 0; j < nk; j++)
            for (int t = 0; t < nv; t++) {
              vf w = load(Vb + j * v_row + d + VL * t);
              a[0][t] += w * S[r][j];
              a[1][t] += w * S[r1][j];
            }
        }
        for (int t = 0; t < nv; t++) {
          store(&O[r][d + VL * t], a[0][t]);
          if (r1 > r) store(&O[r1][d + VL * t], a[1][t]);
        }
      }
  }
  for (int r = 0; r < R; r++)
    for (int d = 0; d < D; d++) out[r][d] = O[r][d] / sum[r];
}

// ---- one layer -----------------------------------------------------------------------------

struct Layer {
  Linear qkv, out, gate_up, down;
  const float *norm_in, *norm_mlp, *norm_q, *norm_k;
  float eps_in, eps_mlp, eps_q, eps_k, scale;
  long H, I, heads, kv_heads, D;
};

static void attend_rows(const Layer &L, const float *qkv, const View &w, long r0, long r1, long h0,
                        long count, float *attended) {
  const float *q[MAX_R], *mask[MAX_R];
  float *out[MAX_R];
  long limit[MAX_R], kv_head = h0 / (L.heads / L.kv_heads);
  int R = 0;
  for (long r = r0; r < r1; r++)
    for (long h = h0; h < h0 + count; h++, R++) {
      q[R] = qkv + (w.start + r) * L.qkv.O + h * L.D;
      out[R] = attended + (w.start + r) * L.heads * L.D + h * L.D;
      mask[R] = w.mask ? w.mask + r * w.mask_row : nullptr;
      limit[R] = w.causal ? w.L - w.n + r + 1 : w.L;
    }
  attend(q, out, mask, limit, R, w.K + kv_head * w.k_head, w.k_row, w.V + kv_head * w.v_head,
         w.v_row, w.L, L.D, L.scale);
}

}  // namespace

extern "C" {

// x[n][H] → qkv[n][(heads + 2 kv_heads) D]; queries and keys normed and rotated. `sine` has the
// sign of the rotation in it: (a, b) → (a cos + b sin, b cos + a sin). h: [n][H] of scratch.
void dw_qkv(const Layer *layer, const float *x, const float *cosine, const float *sine, float *h,
            float *qkv, long n, int threads) {
  const Layer &L = *layer;
#pragma omp parallel num_threads(threads)
  {
    long t = omp_get_thread_num(), T = omp_get_num_threads();
    for (long i = share(n, t, T); i < share(n, t + 1, T); i++)
      rms_norm(x + i * L.H, L.norm_in, L.eps_in, L.H, h + i * L.H);
#pragma omp barrier
    long P = panels(L.qkv.O);
    linear(L.qkv, h, qkv, n, false, share(P, t, T), share(P, t + 1, T));
#pragma omp barrier
    long turning = L.heads + L.kv_heads, half = L.D / 2, work = n * turning;
    for (long i = share(work, t, T); i < share(work, t + 1, T); i++) {
      long row = i / turning, head = i % turning;
      bool is_query = head < L.heads;
      float *p = qkv + row * L.qkv.O + head * L.D;
      const float *c = cosine + row * L.D, *s = sine + row * L.D;
      if (L.norm_q)
        rms_norm(p, is_query ? L.norm_q : L.norm_k, is_query ? L.eps_q : L.eps_k, L.D, p);
      for (long d = 0; d < half; d++) {
        float a = p[d], b = p[d + half];
        p[d] = a * c[d] + b * s[d];
        p[d + half] = b * c[d + half] + a * s[d + half];
      }
    }
  }
}

// The rest of the layer: y = x + attention, then y += mlp. Scratch: attended [n][heads D],
// h [n][H], inner [n][I].
void dw_rest(const Layer *layer, const float *x, const float *qkv, const View *views,
             long num_views, float *attended, float *h, float *inner, float *y, long n,
             int threads) {
  const Layer &L = *layer;
  long ticket = 0;
#pragma omp parallel num_threads(threads)
  {
    long t = omp_get_thread_num(), T = omp_get_num_threads();
    long groups = L.heads / L.kv_heads, per_block = groups < MAX_R / 9 ? 9 : MAX_R / groups;
    long unit = 0, mine = __atomic_fetch_add(&ticket, 1, __ATOMIC_RELAXED);
    for (long v = 0; v < num_views; v++) {
      long blocks = (views[v].n + per_block - 1) / per_block;
      bool split = blocks * L.kv_heads < 2 * T;  // few rows: share the heads of a group as well
      long count = split ? 1 : groups, units = L.heads / count;
      for (long b = 0; b < blocks; b++)
        for (long u = 0; u < units; u++, unit++) {
          if (unit != mine) continue;
          long r0 = share(views[v].n, b, blocks), r1 = share(views[v].n, b + 1, blocks);
          attend_rows(L, qkv, views[v], r0, r1, u * count, count, attended);
          mine = __atomic_fetch_add(&ticket, 1, __ATOMIC_RELAXED);
        }
    }
    for (long i = share(n * L.H, t, T); i < share(n * L.H, t + 1, T); i++) y[i] = x[i];
#pragma omp barrier
    long P = panels(L.out.O);
    linear(L.out, attended, y, n, true, share(P, t, T), share(P, t + 1, T));
#pragma omp barrier
    for (long i = share(n, t, T); i < share(n, t + 1, T); i++)
      rms_norm(y + i * L.H, L.norm_mlp, L.eps_mlp, L.H, h + i * L.H);
#pragma omp barrier
    P = panels(L.I);  // the panels of gate and up alternate
    alignas(64) float gate[MAX_ROWS * NR], up[MAX_ROWS * NR];
    Packed rows(h, n, L.H);
    for (long p = share(P, t, T); p < share(P, t + 1, T); p++)
      for (long r = 0; r < n; r += MAX_ROWS) {
        long m = least(MAX_ROWS, n - r);
        const float *w = L.gate_up.w + p * L.H * NR * 2;
        panel(w, rows.x + r * rows.row, m, L.H, gate);
        panel(w + L.H * NR, rows.x + r * rows.row, m, L.H, up);
        for (long i = 0; i < m; i++) {
          float *g = gate + NR * i;
          UNROLL for (int j = 0; j < NV; j++) {
            vf z = *(vf *)(g + VL * j);
            *(vf *)(g + VL * j) = z / (1.f + exp_of(-z)) * *(vf *)(up + NR * i + VL * j);
          }
          memcpy(inner + (r + i) * L.I + p * NR, g, least(NR, L.I - p * NR) * 4);
        }
      }
#pragma omp barrier
    P = panels(L.down.O);
    linear(L.down, inner, y, n, true, share(P, t, T), share(P, t + 1, T));
  }
}

// All layers: outputs[num_layers][n][H]; views[num_layers][num_views].
void dw_stack(const Layer *layers, long num_layers, const float *x, const float *cosine,
              const float *sine, const View *views, long num_views, float *h, float *qkv,
              float *attended, float *inner, float *outputs, long n, int threads) {
  for (long l = 0; l < num_layers; l++, views += num_views) {
    const Layer &L = layers[l];
    dw_qkv(&L, x, cosine, sine, h, qkv, n, threads);
    for (const View *w = views; w < views + num_views; w++)
      for (long r = 0; r < w->n; r++)
        for (long g = 0; g < L.kv_heads; g++) {
          const float *key = qkv + (w->start + r) * L.qkv.O + (L.heads + g) * L.D;
          memcpy(w->new_K + g * w->k_head + r * w->k_row, key, L.D * 4);
          memcpy(w->new_V + g * w->v_head + r * w->v_row, key + L.kv_heads * L.D, L.D * 4);
        }
    float *y = outputs + l * n * L.H;
    dw_rest(&L, x, qkv, views, num_views, attended, h, inner, y, n, threads);
    x = y;
  }
}

void dw_linear(const Linear *l, const float *x, float *y, long n, int threads) {
#pragma omp parallel num_threads(threads)
  {
    long t = omp_get_thread_num(), T = omp_get_num_threads(), P = panels(l->O);
    linear(*l, x, y, n, false, share(P, t, T), share(P, t + 1, T));
  }
}

// W[O][K] into panels, `stride` apart (2 where those of two matrices alternate)
void dw_pack(const float *W, float *out, long K, long O, long stride, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < panels(O); p++)
    for (long k = 0; k < K; k++)
      for (int j = 0; j < NR; j++) {
        long o = p * NR + j;
        out[(p * stride * K + k) * NR + j] = o < O ? W[o * K + k] : 0;
      }
}

int dw_panel(void) { return NR; }
int dw_vector(void) { return VL; }
}
