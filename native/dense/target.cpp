// One build of the kernels, for the instruction set that the compiler's flags and RECMILL_TARGET name.
//
// Everything here has internal linkage, and no function of the standard library is called: the linker keeps one copy of an
// inline function, and it might keep one with instructions that the CPU at hand does not have.
#include "kernels.hpp"

#define RECMILL_INLINE inline __attribute__((always_inline))

namespace dense {
namespace {

// ROWS x VECTORS accumulators, one row of VECTORS weights and one broadcast value have to fit the registers.
#if defined(__AVX512F__)
constexpr size_t LANES = 16;  // 32 registers
constexpr int ROWS = 14, VECTORS = 2;
#elif defined(__AVX2__)
constexpr size_t LANES = 8;  // 16 registers
constexpr int ROWS = 6, VECTORS = 2;
#elif defined(__aarch64__)
constexpr size_t LANES = 4;  // 32 registers
constexpr int ROWS = 6, VECTORS = 4;
#else
constexpr size_t LANES = 4;  // 16 registers, and products need one of their own
constexpr int ROWS = 4, VECTORS = 2;
#endif

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(alignof(float)), may_alias));

RECMILL_INLINE Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
RECMILL_INLINE void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
RECMILL_INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }

// A vector of which the first `count` floats are in memory: without WHOLE there may be fewer than LANES, the rest is 0.
template <bool WHOLE>
RECMILL_INLINE Vector load_some(const float* from, size_t count) {
  if (WHOLE || count >= LANES) return load(from);
  Vector value{};
  __builtin_memcpy(&value, from, count * sizeof(float));
  return value;
}

template <bool WHOLE>
RECMILL_INLINE void store_some(float* to, Vector value, size_t count) {
  if (WHOLE || count >= LANES) store(to, value);
  else __builtin_memcpy(to, &value, count * sizeof(float));
}

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

// run(Constant<vectors>, Constant<whole>, column) for each panel: as wide as registers allow, and a narrower one for the
// rest, whose last vector may not be whole.
template <int WIDEST, class Run>
RECMILL_INLINE void for_panels(size_t columns, size_t column, Run& run) {
  for (; column + WIDEST * LANES <= columns; column += WIDEST * LANES) run(Constant<WIDEST>{}, Constant<true>{}, column);
  if (column + (WIDEST - 1) * LANES < columns) run(Constant<WIDEST>{}, Constant<false>{}, column);
  else if constexpr (WIDEST > 1) for_panels<WIDEST - 1>(columns, column, run);
}

// run(Constant<rows>, row) for each group of rows that one kernel takes: the largest first, then halves for the rest.
template <int MOST, class Run>
RECMILL_INLINE void for_groups(size_t rows, size_t row, Run& run) {
  for (; row + MOST <= rows; row += MOST) run(Constant<MOST>{}, row);
  if constexpr (MOST > 1) for_groups<MOST / 2>(rows, row, run);
}

// done(i, j, sums) for vector j of row i: the sum over k of a(i, k) * b[k][vector j].
// BY_ROW: a(i, k) = a[i * a_stride + k]; else a[k * a_stride + i].
template <int M, int N, bool BY_ROW, class Done>
RECMILL_INLINE void multiply(size_t depth, const float* __restrict a, size_t a_stride, const float* __restrict b,
                             size_t b_stride, Done done) {
  Vector sums[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) sums[i][j] = Vector{};
  // Three rows share one pointer (p, p + stride, p + 2 stride): a pointer for each would not fit the registers.
  const float* base[(M + 2) / 3];
#pragma GCC unroll 8
  for (int g = 0; g < (M + 2) / 3; ++g) base[g] = a + 3 * g * a_stride;
#pragma GCC unroll 4
  for (size_t k = 0; k < depth; ++k) {
    Vector row[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) row[j] = load(b + j * LANES);
    b += b_stride;
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const float value = BY_ROW ? base[i / 3][(i % 3) * a_stride + k] : a[k * a_stride + i];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sums[i][j] += value * row[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) done(i, j, sums[i][j]);
}

RECMILL_INLINE size_t whole_vectors(size_t columns) { return (columns + LANES - 1) / LANES * LANES; }

size_t packed_size(size_t k, size_t n) { return k * whole_vectors(n); }

void pack(const float* weights, size_t k_stride, size_t n_stride, size_t k, size_t n, float* packed) {
  constexpr size_t SQUARE = 16;  // rows that are transposed at once, so that what is read stays in the first cache
  auto pack_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr size_t WIDTH = decltype(vectors)::value * LANES;
    const size_t used = decltype(whole)::value ? WIDTH : n - column;
    const float* from = weights + column * n_stride;
    if (n_stride == 1) {
      for (size_t row = 0; row < k; ++row)
        for (size_t c = 0; c < WIDTH; ++c) packed[row * WIDTH + c] = c < used ? from[row * k_stride + c] : 0.0f;
    } else {
      for (size_t begin = 0; begin < k; begin += SQUARE)
        for (size_t c = 0; c < WIDTH; ++c)
          for (size_t row = begin; row < least(k, begin + SQUARE); ++row)
            packed[row * WIDTH + c] = c < used ? from[row * k_stride + c * n_stride] : 0.0f;
    }
    packed += k * WIDTH;
  };
  for_panels<VECTORS>(n, 0, pack_panel);
}

// x[rows][k] w[k][n]; done(whole, row, column, sums) is given each vector of the product.
template <class Done>
RECMILL_INLINE void product(size_t rows, size_t k, size_t n, const float* x, size_t x_stride, const float* packed,
                            Done done) {
  auto multiply_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr int WIDE = decltype(vectors)::value;
    auto multiply_group = [&](auto group, size_t row) {
      multiply<decltype(group)::value, WIDE, true>(
          k, x + row * x_stride, x_stride, packed + column * k, WIDE * LANES,
          [&](int i, int j, Vector sums) __attribute__((always_inline)) {
            done(whole, row + i, column + j * LANES, sums);
          });
    };
    for_groups<ROWS>(rows, 0, multiply_group);
  };
  for_panels<VECTORS>(n, 0, multiply_panel);
}

void forward(size_t rows, size_t k, size_t n, const float* x, size_t x_stride, const float* packed, const float* bias,
             bool relu, float* y, size_t y_stride) {
  product(rows, k, n, x, x_stride, packed,
          [&](auto whole, size_t row, size_t column, Vector sums) __attribute__((always_inline)) {
            constexpr bool WHOLE = decltype(whole)::value;
            sums += load_some<WHOLE>(bias + column, n - column);
            if (relu) sums = sums < Vector{} ? Vector{} : sums;
            store_some<WHOLE>(y + row * y_stride + column, sums, n - column);
          });
}

void input_grad(size_t rows, size_t k, size_t n, const float* y_grad, size_t y_stride, const float* packed, const float* x,
                size_t x_stride, float* x_grad, size_t x_grad_stride) {
  product(rows, k, n, y_grad, y_stride, packed,
          [&](auto whole, size_t row, size_t column, Vector sums) __attribute__((always_inline)) {
            constexpr bool WHOLE = decltype(whole)::value;
            if (x) sums = load_some<WHOLE>(x + row * x_stride + column, n - column) > Vector{} ? sums : Vector{};
            store_some<WHOLE>(x_grad + row * x_grad_stride + column, sums, n - column);
          });
}

void weight_grad(size_t rows, size_t in, size_t out, const float* y_grad, size_t y_stride, const float* x, size_t x_stride,
                 bool add, float* w_grad) {
  // A panel of x is copied first: its rows are on as many pages, which is more than the CPU has at hand.
  constexpr size_t MOST_ROWS = 256;
  alignas(64) float panel[MOST_ROWS * VECTORS * LANES];
  auto multiply_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr bool WHOLE = decltype(whole)::value;
    constexpr int WIDE = decltype(vectors)::value;
    const size_t depth = least(rows, MOST_ROWS);
    for (size_t row = 0; row < depth; ++row)
      for (int j = 0; j < WIDE; ++j) {
        const size_t at = column + j * LANES;
        store(panel + (row * WIDE + j) * LANES, load_some<WHOLE>(x + row * x_stride + at, in - at));
      }
    auto multiply_group = [&](auto group, size_t first) {
      multiply<decltype(group)::value, WIDE, false>(
          depth, y_grad + first, y_stride, panel, WIDE * LANES,
          [&](int i, int j, Vector sums) __attribute__((always_inline)) {
            const size_t at = column + j * LANES;
            float* to = w_grad + (first + i) * in + at;
            if (add) sums += load_some<WHOLE>(to, in - at);
            store_some<WHOLE>(to, sums, in - at);
          });
    };
    for_groups<ROWS>(out, 0, multiply_group);
  };
  for (;; add = true) {
    for_panels<VECTORS>(in, 0, multiply_panel);
    if (rows <= MOST_ROWS) return;
    rows -= MOST_ROWS;
    x += MOST_ROWS * x_stride;
    y_grad += MOST_ROWS * y_stride;
  }
}

void bias_grad(size_t rows, size_t out, const float* y_grad, size_t y_stride, bool add, float* b_grad) {
  auto sum_panel = [&](auto vectors, auto whole, size_t column) {
    constexpr bool WHOLE = decltype(whole)::value;
    constexpr int WIDE = decltype(vectors)::value;
    Vector sums[WIDE];
    for (int j = 0; j < WIDE; ++j) {
      const size_t at = column + j * LANES;
      sums[j] = add ? load_some<WHOLE>(b_grad + at, out - at) : Vector{};
    }
    for (size_t row = 0; row < rows; ++row)
      for (int j = 0; j < WIDE; ++j) {
        const size_t at = column + j * LANES;
        sums[j] += load_some<WHOLE>(y_grad + row * y_stride + at, out - at);
      }
    for (int j = 0; j < WIDE; ++j) {
      const size_t at = column + j * LANES;
      store_some<WHOLE>(b_grad + at, sums[j], out - at);
    }
  };
  for_panels<4>(out, 0, sum_panel);
}

#define RECMILL_TEXT(name) RECMILL_TEXT_OF(name)
#define RECMILL_TEXT_OF(name) #name
#define RECMILL_KERNELS(name) RECMILL_KERNELS_OF(name)
#define RECMILL_KERNELS_OF(name) kernels_##name

}  // namespace

extern const Kernels RECMILL_KERNELS(RECMILL_TARGET);
const Kernels RECMILL_KERNELS(RECMILL_TARGET) = {
    RECMILL_TEXT(RECMILL_TARGET), LANES, packed_size, pack, forward, input_grad, weight_grad, bias_grad};

}  // namespace dense
