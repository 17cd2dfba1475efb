// Decoder layers of the Llama shape for a few rows on a CPU: a target's in float32, a drafter's also in
// bfloat16. Compiled when a target is loaded (native.py), with the width of vectors that the machine has.
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
#if defined(__AVX512BF16__)
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#if defined(__AVX512F__)
constexpr int VL = 16, MR = 8, MIX = 4;  // floats per vector, rows at a time: of x, of P
#elif defined(__AVX2__)
constexpr int VL = 8, MR = 4, MIX = 2;
#else
constexpr int VL = 4, MR = 4, MIX = 2;
#endif
constexpr int NV = 3, NR = NV * VL;  // MR · NV sums, NV weights and one input fit the registers
constexpr int KB = 64;               // inputs at a time: their rows stay in the first cache
constexpr int LINES = (2 * NR * 4 + 63) / 64;  // cache lines of the weights of two inputs
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
    if (passes == 1) block<LINES>(wk, xk, n, kb, acc, k == 0, passes);
    else if (passes == 2) block<(LINES + 1) / 2>(wk, xk, n, kb, acc, k == 0, passes);
    else block<(LINES + 2) / 3>(wk, xk, n, kb, acc, k == 0, passes);
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

// Rows and weights in float32: the target's.
struct Single {
  typedef Packed Rows;
  static constexpr int MOST = MAX_ROWS;  // rows at a time
  static void product(const float *w, const Rows &rows, long r, long m, long K, float *acc) {
    panel(w, rows.x + r * rows.row, m, K, acc);
  }
  static const float *at(const float *w, long panel, long K) { return w + panel * K * NR; }
};

// ---- products of drafts, which may round ------------------------------------------------------

#if defined(__AVX512BF16__)
constexpr int AHEAD = 2048;  // bytes between what is used and what is fetched

// acc[M][NR] = x[M] · panel over pairs of inputs, in bfloat16 with float32 sums
template <int M>
static void micro_half(const uint32_t *w, const uint32_t *x, long pairs, float *acc) {
  __m512 a[M][NV];
  UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < NV; j++) a[i][j] = _mm512_setzero_ps();
  for (long k = 0; k < pairs; k++, w += NR) {
    __m512bh ww[NV];
    UNROLL for (int j = 0; j < NV; j++) {
      __builtin_prefetch((const char *)(w + VL * j) + AHEAD, 0, 3);
      ww[j] = (__m512bh)_mm512_loadu_si512(w + VL * j);
    }
    UNROLL for (int i = 0; i < M; i++) {
      __m512bh b = (__m512bh)_mm512_set1_epi32(x[i * pairs + k]);
      UNROLL for (int j = 0; j < NV; j++) a[i][j] = _mm512_dpbf16_ps(a[i][j], ww[j], b);
    }
  }
  UNROLL for (int i = 0; i < M; i++)
    UNROLL for (int j = 0; j < NV; j++) _mm512_storeu_ps(acc + NR * i + VL * j, a[i][j]);
}

static void panel_half(const uint32_t *w, const uint32_t *x, long n, long pairs, float *acc) {
  switch (n) {
#define HALF_ROWS(M) case M: return micro_half<M>(w, x, pairs, acc);
    HALF_ROWS(1) HALF_ROWS(2) HALF_ROWS(3) HALF_ROWS(4)
    HALF_ROWS(5) HALF_ROWS(6) HALF_ROWS(7) HALF_ROWS(8)
  }
}

#if defined(TILES)
// The same on AMX, 32 inputs at a time: a panel's 16 pairs of 16 outputs are a tile as they lie.
// Tiles 0 … 2 and 3 … 5 are the sums of the first and the last 16 rows.
static bool has_tiles;  // set once, when the library is loaded

static bool may_use_tiles() {  // asks the system
  const long request = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

static const struct {  // eight tiles of 16 rows of 64 bytes
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} shapes = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

static void panel_tiles(const uint32_t *w, const uint32_t *x, long n, long pairs, float *acc) {
  asm volatile("" ::: "memory");  // what the tiles read has been written
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (long k = 0; k < pairs; k += 16, w += 16 * NR) {
    for (int line = 0; line < NR; line++)
      __builtin_prefetch((const char *)w + 64 * line + 4 * AHEAD, 0, 3);
    _tile_loadd(6, x + k, pairs * 4);
    _tile_loadd(7, w, NR * 4);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, w + 16, NR * 4);
    _tile_dpbf16ps(1, 6, 7);
    _tile_loadd(7, w + 32, NR * 4);
    _tile_dpbf16ps(2, 6, 7);
    if (n <= 16) continue;
    _tile_loadd(6, x + 16 * pairs + k, pairs * 4);
    _tile_dpbf16ps(5, 6, 7);
    _tile_loadd(7, w + 16, NR * 4);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(7, w, NR * 4);
    _tile_dpbf16ps(3, 6, 7);
  }
  _tile_stored(0, acc, NR * 4);
  _tile_stored(1, acc + 16, NR * 4);
  _tile_stored(2, acc + 32, NR * 4);
  if (n <= 16) return;
  acc += 16 * NR;
  _tile_stored(3, acc, NR * 4);
  _tile_stored(4, acc + 16, NR * 4);
  _tile_stored(5, acc + 32, NR * 4);
}
#endif

INLINE uint16_t half_of(float x) {  // to the nearest, ties to even
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (u >> 16) | 0x40;  // not a number
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

// This thread's copy of rows x[n][K] in bfloat16; K is even. It has the tiles while it lives.
struct Halves {
  const uint32_t *x;
  long row;    // pairs per row
  bool tiled;  // there is room for whole tiles of rows; what lies in it may be anything
  Halves(const float *rows, long n, long K) {
    static thread_local uint16_t *buffer;
    static thread_local long size;
    row = K / 2;
    long wanted = (n + 15) / 16 * 16 * K;
    if (size < wanted) {
      free(buffer);
      size = (wanted + 31) / 32 * 32;
      buffer = (uint16_t *)aligned_alloc(64, size * 2);
    }
    for (long i = 0; i < n * K; i++) buffer[i] = half_of(rows[i]);
    x = (const uint32_t *)buffer;
    tiled = false;
#if defined(TILES)
    tiled = has_tiles && row % 16 == 0;
    if (tiled) _tile_loadconfig(&shapes);
#endif
  }
  ~Halves() {
#if defined(TILES)
    if (tiled) _tile_release();
#endif
  }
};

// Both in bfloat16; `w` points to pairs.
struct Half {
  typedef Halves Rows;
  static constexpr int MOST = 32;
  static void product(const float *w, const Rows &rows, long r, long m, long K, float *acc) {
    const uint32_t *pairs = (const uint32_t *)w, *x = rows.x + r * rows.row;
#if defined(TILES)
    if (rows.tiled) return panel_tiles(pairs, x, m, rows.row, acc);
#endif
    for (long i = 0; i < m; i += 8)
      panel_half(pairs, x + i * rows.row, least(8, m - i), rows.row, acc + i * NR);
  }
  static const float *at(const float *w, long panel, long K) { return w + panel * K / 2 * NR; }
};
#endif

// y[n][O] (+)= x · Wᵀ + bias, for panels a … b
template <class As>
static void linear(const Linear &l, const float *x, float *y, long n, bool add, long a, long b) {
  alignas(64) float acc[As::MOST * NR];
  typename As::Rows rows(x, n, l.K);
  for (long p = a; p < b; p++) {
    int count = least(NR, l.O - p * NR);
    for (long r = 0; r < n; r += As::MOST) {
      long m = least(As::MOST, n - r);
      As::product(As::at(l.w, p, l.K), rows, r, m, l.K, acc);
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

// S[NJ keys][row of queries] = scale · K · Q for NQ vectors of queries; Q lies transposed
template <int NQ, int NJ>
INLINE void scores(const float *Q, long width, const float *K, long k_row, int D, float scale,
                   float *S) {
  vf a[NJ][NQ];
  UNROLL for (int j = 0; j < NJ; j++) UNROLL for (int t = 0; t < NQ; t++) a[j][t] = (vf){};
  for (int d = 0; d < D; d++, Q += width) {
    vf q[NQ];
    UNROLL for (int t = 0; t < NQ; t++) q[t] = *(const vf *)(Q + VL * t);
    UNROLL for (int j = 0; j < NJ; j++) {
      float k = K[j * k_row + d];
      UNROLL for (int t = 0; t < NQ; t++) a[j][t] += q[t] * k;
    }
  }
  UNROLL for (int j = 0; j < NJ; j++)
    UNROLL for (int t = 0; t < NQ; t++) *(vf *)(S + j * width + VL * t) = a[j][t] * scale;
}

template <int NQ, int NJ>
static void all_scores(const float *Q, long width, const float *K, long k_row, int nk, int D,
                       float scale, float *S) {
  int j = 0;
  for (; j + NJ <= nk; j += NJ)
    scores<NQ, NJ>(Q, width, K + j * k_row, k_row, D, scale, S + j * width);
  for (; j < nk; j++) scores<NQ, 1>(Q, width, K + j * k_row, k_row, D, scale, S + j * width);
}

// O[M rows][NT vectors] += Pᵀ · V over nk keys
template <int M, int NT>
INLINE void mix(const float *P, long width, const float *V, long v_row, int nk, float *O, int D) {
  vf a[M][NT];
  UNROLL for (int i = 0; i < M; i++)
    UNROLL for (int t = 0; t < NT; t++) a[i][t] = *(vf *)(O + i * D + VL * t);
  for (int j = 0; j < nk; j++, P += width, V += v_row) {
    vf w[NT];
    UNROLL for (int t = 0; t < NT; t++) w[t] = load(V + VL * t);
    UNROLL for (int i = 0; i < M; i++)
      UNROLL for (int t = 0; t < NT; t++) a[i][t] += w[t] * P[i];
  }
  UNROLL for (int i = 0; i < M; i++)
    UNROLL for (int t = 0; t < NT; t++) *(vf *)(O + i * D + VL * t) = a[i][t];
}

template <int M>
static void mix_rows(const float *P, long width, const float *V, long v_row, int nk, int D,
                     float *O) {
  int d = 0;
  for (; d + 4 * VL <= D; d += 4 * VL) mix<M, 4>(P, width, V + d, v_row, nk, O + d, D);
  for (; d < D; d += VL) mix<M, 1>(P, width, V + d, v_row, nk, O + d, D);
}

static bool is_zero(const float *p, int n) {
  vf any = {};
  int j = 0;
  for (; j + VL <= n; j += VL) {
    vf v = load(p + j);
    any = any < v * v ? v * v : any;
  }
  for (; j < n; j++) if (p[j] != 0) return false;
  return max_of(any) == 0;
}

// R query rows over the keys of one head, BK keys at a time with a running maximum. Vectors run
// over the queries and every sum over its keys in order, so that a row's result depends neither on
// the rows beside it nor on keys that it does not see.
static void attend(const float **q, float **out, const float **mask, const long *limit, int R,
                   const float *K, long k_row, const float *V, long v_row, long L, int D,
                   float scale) {
  alignas(64) float Q[MAX_D * MAX_R], S[BK * MAX_R], O[MAX_R * MAX_D];
  alignas(64) float top[MAX_R], sum[MAX_R], shrink[MAX_R];
  int vectors = (R + VL - 1) / VL, width = vectors * VL;
  for (int d = 0; d < D; d++)
    for (int r = 0; r < width; r++) Q[d * width + r] = r < R ? q[r][d] : 0.f;
  for (int r = 0; r < width; r++) top[r] = -INFINITY, sum[r] = 0;
  memset(O, 0, sizeof(float) * R * D);
  for (long k0 = 0; k0 < L; k0 += BK) {
    int nk = least(BK, L - k0);
    const float *Kb = K + k0 * k_row, *Vb = V + k0 * v_row;
    for (int v = 0; v < vectors; v += 3) {
      const float *Qv = Q + v * VL;
      float *Sv = S + v * VL;
      switch (least(3, vectors - v)) {
        case 1: all_scores<1, 8>(Qv, width, Kb, k_row, nk, D, scale, Sv); break;
        case 2: all_scores<2, 4>(Qv, width, Kb, k_row, nk, D, scale, Sv); break;
        default: all_scores<3, 4>(Qv, width, Kb, k_row, nk, D, scale, Sv);
      }
    }
    for (int r = 0; r < R; r++) {
      if (mask[r] && !is_zero(mask[r] + k0, nk))
        for (int j = 0; j < nk; j++) S[j * width + r] += mask[r][k0 + j];
      for (int j = limit[r] > k0 ? least(nk, limit[r] - k0) : 0; j < nk; j++)
        S[j * width + r] = -INFINITY;
    }
    for (int v = 0; v < vectors; v++) {
      float *s = S + v * VL;
      vf old = *(vf *)(top + v * VL), best = old, total = {};
      for (int j = 0; j < nk; j++) {
        vf x = *(vf *)(s + j * width);
        best = x > best ? x : best;
      }
      *(vf *)(top + v * VL) = best;
      best = best == splat(-INFINITY) ? (vf){} : best;
      for (int j = 0; j < nk; j++) {
        vf x = *(vf *)(s + j * width), e = exp_of(x - best);
        e = x == splat(-INFINITY) ? (vf){} : e;
        *(vf *)(s + j * width) = e;
        total += e;
      }
      vf c = exp_of(old - best);
      *(vf *)(shrink + v * VL) = c;
      *(vf *)(sum + v * VL) = *(vf *)(sum + v * VL) * c + total;
    }
    for (int r = 0; r < R; r++)
      if (shrink[r] != 1)
        for (int d = 0; d < D; d += VL) *(vf *)(O + r * D + d) *= shrink[r];
    int r = 0;
    for (; r + MIX <= R; r += MIX) mix_rows<MIX>(S + r, width, Vb, v_row, nk, D, O + r * D);
    for (; r < R; r++) mix_rows<1>(S + r, width, Vb, v_row, nk, D, O + r * D);
  }
  for (int r = 0; r < R; r++)
    for (int d = 0; d < D; d++) out[r][d] = O[r * D + d] / sum[r];
}

// ---- one layer -----------------------------------------------------------------------------

struct Layer {
  Linear qkv, out, gate_up, down;
  const float *norm_in, *norm_mlp, *norm_q, *norm_k;
  float eps_in, eps_mlp, eps_q, eps_k, scale;
  long H, I, heads, kv_heads, D;
};

static void attend_rows(const Layer &L, const float *qkv, const View &w, long r0, long r1,
                        long kv_head, float *attended) {
  const float *q[MAX_R], *mask[MAX_R];
  float *out[MAX_R];
  long limit[MAX_R], groups = L.heads / L.kv_heads;
  int R = 0;
  for (long r = r0; r < r1; r++)
    for (long h = kv_head * groups; h < (kv_head + 1) * groups; h++, R++) {
      q[R] = qkv + (w.start + r) * L.qkv.O + h * L.D;
      out[R] = attended + (w.start + r) * L.heads * L.D + h * L.D;
      mask[R] = w.mask ? w.mask + r * w.mask_row : nullptr;
      limit[R] = w.causal ? w.L - w.n + r + 1 : w.L;
    }
  attend(q, out, mask, limit, R, w.K + kv_head * w.k_head, w.k_row, w.V + kv_head * w.v_head,
         w.v_row, w.L, L.D, L.scale);
}


// x[n][H] → qkv[n][(heads + 2 kv_heads) D]; queries and keys normed and rotated. `sine` has the
// sign of the rotation in it: (a, b) → (a cos + b sin, b cos + a sin). h: [n][H] of scratch.
template <class As>
static void project(const Layer *layer, const float *x, const float *cosine, const float *sine,
                    float *h, float *qkv, long n, int threads) {
  const Layer &L = *layer;
#pragma omp parallel num_threads(threads)
  {
    long t = omp_get_thread_num(), T = omp_get_num_threads();
    for (long i = share(n, t, T); i < share(n, t + 1, T); i++)
      rms_norm(x + i * L.H, L.norm_in, L.eps_in, L.H, h + i * L.H);
#pragma omp barrier
    long P = panels(L.qkv.O);
    linear<As>(L.qkv, h, qkv, n, false, share(P, t, T), share(P, t + 1, T));
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
template <class As>
static void rest(const Layer *layer, const float *x, const float *qkv, const View *views,
                 long num_views, float *attended, float *h, float *inner, float *y, long n,
                 int threads) {
  const Layer &L = *layer;
  long ticket = 0;
#pragma omp parallel num_threads(threads)
  {
    long t = omp_get_thread_num(), T = omp_get_num_threads();
    long per_block = MAX_R / (L.heads / L.kv_heads);
    long unit = 0, mine = __atomic_fetch_add(&ticket, 1, __ATOMIC_RELAXED);
    for (long v = 0; v < num_views; v++) {
      long blocks = (views[v].n + per_block - 1) / per_block;
      while (blocks * L.kv_heads < 3 * T && blocks < views[v].n) blocks++;
      for (long b = 0; b < blocks; b++)
        for (long g = 0; g < L.kv_heads; g++, unit++) {
          if (unit != mine) continue;
          long r0 = share(views[v].n, b, blocks), r1 = share(views[v].n, b + 1, blocks);
          attend_rows(L, qkv, views[v], r0, r1, g, attended);
          mine = __atomic_fetch_add(&ticket, 1, __ATOMIC_RELAXED);
        }
    }
    for (long i = share(n * L.H, t, T); i < share(n * L.H, t + 1, T); i++) y[i] = x[i];
#pragma omp barrier
    long P = panels(L.out.O);
    linear<As>(L.out, attended, y, n, true, share(P, t, T), share(P, t + 1, T));
#pragma omp barrier
    for (long i = share(n, t, T); i < share(n, t + 1, T); i++)
      rms_norm(y + i * L.H, L.norm_mlp, L.eps_mlp, L.H, h + i * L.H);
#pragma omp barrier
    P = panels(L.I);  // the panels of gate and up alternate
    alignas(64) float gate[As::MOST * NR], up[As::MOST * NR];
    typename As::Rows rows(h, n, L.H);
    for (long p = share(P, t, T); p < share(P, t + 1, T); p++)
      for (long r = 0; r < n; r += As::MOST) {
        long m = least(As::MOST, n - r);
        As::product(As::at(L.gate_up.w, 2 * p, L.H), rows, r, m, L.H, gate);
        As::product(As::at(L.gate_up.w, 2 * p + 1, L.H), rows, r, m, L.H, up);
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
    linear<As>(L.down, inner, y, n, true, share(P, t, T), share(P, t + 1, T));
  }
}

// All layers: outputs[num_layers][n][H]; views[num_layers][num_views].
template <class As>
static void stack(const Layer *layers, long num_layers, const float *x, const float *cosine,
                  const float *sine, const View *views, long num_views, float *h, float *qkv,
                  float *attended, float *inner, float *outputs, long n, int threads) {
  for (long l = 0; l < num_layers; l++, views += num_views) {
    const Layer &L = layers[l];
    project<As>(&L, x, cosine, sine, h, qkv, n, threads);
    for (const View *w = views; w < views + num_views; w++)
      for (long r = 0; r < w->n; r++)
        for (long g = 0; g < L.kv_heads; g++) {
          const float *key = qkv + (w->start + r) * L.qkv.O + (L.heads + g) * L.D;
          memcpy(w->new_K + g * w->k_head + r * w->k_row, key, L.D * 4);
          memcpy(w->new_V + g * w->v_head + r * w->v_row, key + L.kv_heads * L.D, L.D * 4);
        }
    float *y = outputs + l * n * L.H;
    rest<As>(&L, x, qkv, views, num_views, attended, h, inner, y, n, threads);
    x = y;
  }
}

template <class As>
static void linear_all(const Linear *l, const float *x, float *y, long n, int threads) {
#pragma omp parallel num_threads(threads)
  {
    long t = omp_get_thread_num(), T = omp_get_num_threads(), P = panels(l->O);
    linear<As>(*l, x, y, n, false, share(P, t, T), share(P, t + 1, T));
  }
}

}  // namespace

extern "C" {

void dw_qkv(const Layer *layer, const float *x, const float *cosine, const float *sine, float *h,
            float *qkv, long n, int threads) {
  project<Single>(layer, x, cosine, sine, h, qkv, n, threads);
}

void dw_rest(const Layer *layer, const float *x, const float *qkv, const View *views,
             long num_views, float *attended, float *h, float *inner, float *y, long n,
             int threads) {
  rest<Single>(layer, x, qkv, views, num_views, attended, h, inner, y, n, threads);
}

#define STACK(NAME, AS)                                                                          \
  void NAME(const Layer *layers, long num_layers, const float *x, const float *cosine,           \
            const float *sine, const View *views, long num_views, float *h, float *qkv,          \
            float *attended, float *inner, float *outputs, long n, int threads) {                \
    stack<AS>(layers, num_layers, x, cosine, sine, views, num_views, h, qkv, attended, inner,    \
              outputs, n, threads);                                                              \
  }
#define LINEAR(NAME, AS)                                                              \
  void NAME(const Linear *l, const float *x, float *y, long n, int threads) {          \
    linear_all<AS>(l, x, y, n, threads);                                               \
  }
STACK(dw_stack, Single)
LINEAR(dw_linear, Single)

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

#if defined(__AVX512BF16__)
int dw_has_half(void) {
#if defined(TILES)
  has_tiles = may_use_tiles();
#endif
  return 1;
}
STACK(dw_stack_half, Half)
LINEAR(dw_linear_half, Half)

// W[O][K] into panels of bfloat16 pairs [O / NR][K / 2][NR][2], `stride` apart; K is even
void dw_pack_half(const float *W, uint16_t *out, long K, long O, long stride, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < panels(O); p++)
    for (long k = 0; k < K; k++)
      for (int j = 0; j < NR; j++) {
        long o = p * NR + j;
        out[(p * stride * K + k / 2 * 2) * NR + 2 * j + k % 2] =
            o < O ? half_of(W[o * K + k]) : 0;
      }
}
#else
int dw_has_half(void) { return 0; }
STACK(dw_stack_half, Single)  // never called
LINEAR(dw_linear_half, Single)
void dw_pack_half(const float *, uint16_t *, long, long, long, int) {}
#endif

int dw_panel(void) { return NR; }
int dw_vector(void) { return VL; }
}
