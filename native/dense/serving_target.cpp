// One build of the serving kernels, for the instruction set that the compiler's flags and RECMILL_TARGET name. As in
// target.cpp, everything has internal linkage and nothing of the standard library is called.
#include "serving.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define RECMILL_INLINE inline __attribute__((always_inline))

namespace dense {
namespace {

// ROWS x VECTORS accumulators, VECTORS weights and one broadcast value have to fit the registers.
#if defined(__AVX512VNNI__)
constexpr size_t LANES = 16;
constexpr int ROWS = 6, VECTORS = 4;
#elif defined(__AVX2__)
constexpr size_t LANES = 8;
constexpr int ROWS = 4, VECTORS = 2;
#else
constexpr size_t LANES = 4;
constexpr int ROWS = 2, VECTORS = 2;
#endif
constexpr size_t PANEL = VECTORS * LANES;

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(alignof(float)), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef int32_t UnalignedInts __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(1), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t UnalignedBytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t SignedBytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t Halves __attribute__((vector_size(LANES * sizeof(int16_t)), aligned(1), may_alias));

RECMILL_INLINE Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
RECMILL_INLINE void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
RECMILL_INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }

// --- rows of tables

// A half float is a float with a smaller exponent: shifted into place, it is its value times 2^-112.
constexpr float HALF_SCALE = 0x1p112f;

RECMILL_INLINE Vector floats_of(const uint16_t* halves) {
  const Ints wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(halves), Ints);  // the sign fills the bits above
  const Ints bits = (wide << 13) & static_cast<int32_t>(0x8FFFE000);
  return reinterpret_cast<Vector>(bits) * HALF_SCALE;
}
RECMILL_INLINE float float_of(uint16_t half) {
  const uint32_t bits = (uint32_t{half} & 0x8000u) << 16 | (uint32_t{half} & 0x7FFFu) << 13;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value * HALF_SCALE;
}

RECMILL_INLINE void copy_row(const float* from, size_t dim, float, float* to) {
  size_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(to + i, load(from + i));
  for (; i < dim; ++i) to[i] = from[i];
}
RECMILL_INLINE void copy_row(const uint16_t* from, size_t dim, float, float* to) {
  size_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(to + i, floats_of(from + i));
  for (; i < dim; ++i) to[i] = float_of(from[i]);
}
RECMILL_INLINE void copy_row(const int8_t* from, size_t dim, float scale, float* to) {
  size_t i = 0;
  for (; i + LANES <= dim; i += LANES)
    store(to + i, __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const SignedBytes*>(from + i), Ints), Vector) * scale);
  for (; i < dim; ++i) to[i] = static_cast<float>(from[i]) * scale;
}

template <class T>
RECMILL_INLINE void gather_of(const T* values, const float* scales, size_t dim, const int64_t* slots, size_t count, float* to,
                              size_t stride) {
  constexpr size_t AHEAD = 16;
  for (size_t i = 0; i < least(AHEAD, count); ++i) __builtin_prefetch(values + slots[i] * static_cast<int64_t>(dim));
  for (size_t i = 0; i < count; ++i) {
    if (i + AHEAD < count) {
      __builtin_prefetch(values + slots[i + AHEAD] * static_cast<int64_t>(dim));
      if (scales) __builtin_prefetch(scales + slots[i + AHEAD]);
    }
    copy_row(values + slots[i] * static_cast<int64_t>(dim), dim, scales ? scales[slots[i]] : 1.0f, to + i * stride);
  }
}

void gather(const Rows& rows, const int64_t* slots, size_t count, float* to, size_t stride) {
  if (rows.type == RowType::FLOAT32) gather_of(static_cast<const float*>(rows.values), nullptr, rows.dim, slots, count, to, stride);
  else if (rows.type == RowType::FLOAT16) gather_of(static_cast<const uint16_t*>(rows.values), nullptr, rows.dim, slots, count, to, stride);
  else gather_of(static_cast<const int8_t*>(rows.values), rows.scales, rows.dim, slots, count, to, stride);
}

// --- sums of rows

constexpr size_t MOST_TABLES = 32;  // that are added in one pass

// Chunks of VECTORS_AT_ONCE vectors stay in registers while the tables' rows are added.
template <int COUNT>
RECMILL_INLINE void add_chunk(const float* const* from, size_t num_tables, size_t column, float* y, bool relu) {
  Vector sums[COUNT];
#pragma GCC unroll 8
  for (int j = 0; j < COUNT; ++j) sums[j] = load(y + column + j * LANES);
  for (size_t t = 0; t < num_tables; ++t)
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; ++j) sums[j] += load(from[t] + column + j * LANES);
#pragma GCC unroll 8
  for (int j = 0; j < COUNT; ++j) {
    if (relu) sums[j] = sums[j] < Vector{} ? Vector{} : sums[j];
    store(y + column + j * LANES, sums[j]);
  }
}

void add_rows(size_t rows, size_t n, float* y, size_t stride, const float* const* tables, size_t num_tables,
              const int32_t* slots, size_t slots_stride) {
  for (size_t start = 0; start < num_tables; start += MOST_TABLES) {
    const size_t some = least(MOST_TABLES, num_tables - start);
    const bool relu = start + some == num_tables;
    for (size_t row = 0; row < rows; ++row) {
      const float* from[MOST_TABLES];
      for (size_t t = 0; t < some; ++t)
        from[t] = tables[start + t] + static_cast<size_t>(slots[(start + t) * slots_stride + row]) * stride;
      float* to = y + row * stride;
      size_t column = 0;
      for (; column + 8 * LANES <= n; column += 8 * LANES) add_chunk<8>(from, some, column, to, relu);
      for (; column + LANES <= n; column += LANES) add_chunk<1>(from, some, column, to, relu);
      for (; column < n; ++column) {
        float sum = to[column];
        for (size_t t = 0; t < some; ++t) sum += from[t][column];
        to[column] = relu && sum < 0 ? 0 : sum;
      }
    }
  }
}

// --- dot products

RECMILL_INLINE float dot(const float* a, const float* b, size_t dim) {
  Vector sums{};
  size_t i = 0;
  for (; i + LANES <= dim; i += LANES) sums += load(a + i) * load(b + i);
  float sum = 0;
  for (size_t lane = 0; lane < LANES && i; ++lane) sum += sums[lane];
  for (; i < dim; ++i) sum += a[i] * b[i];
  return sum;
}

void pair_dots(size_t count, size_t dim, const float* vectors, float* dots) {
  for (size_t i = 1; i < count; ++i)
    for (size_t j = 0; j < i; ++j) *dots++ = dot(vectors + i * dim, vectors + j * dim, dim);
}

// --- bytes

void to_bytes(size_t count, const float* x, const float* inverse, uint8_t* bytes) {
  constexpr float MOST = 127.0f;
  for (size_t i = 0; i < count; i += LANES) {
    Vector value = load(x + i) * load(inverse + i);
    value = value < -MOST ? Vector{} - MOST : value;
    value = value > MOST ? Vector{} + MOST : value;
    *reinterpret_cast<UnalignedBytes*>(bytes + i) = __builtin_convertvector(__builtin_convertvector(value + 128.5f, Ints), Bytes);
  }
}

#if !defined(__AVX2__)
RECMILL_INLINE int32_t dot4(const uint8_t* x, const int8_t* w) { return x[0] * w[0] + x[1] * w[1] + x[2] * w[2] + x[3] * w[3]; }
#endif

// sums + x w for four inputs and each of LANES columns. Never saturates: 16-bit sums of products would.
RECMILL_INLINE Ints add_products(Ints sums, const uint8_t* x, const int8_t* w) {
#if defined(__AVX512VNNI__)
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(four), _mm512_loadu_si512(w));
#elif defined(__AVXVNNI__)
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, _mm256_set1_epi32(four), _mm256_loadu_si256((const __m256i_u*)w));
#elif defined(__AVX2__)
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  const __m256i inputs = _mm256_set1_epi32(four), weights = _mm256_loadu_si256((const __m256i_u*)w);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(inputs, _mm256_set1_epi16(0xFF)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(weights, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(inputs, 8), _mm256_srai_epi16(weights, 8));
  return (Ints)_mm256_add_epi32((__m256i)sums, _mm256_add_epi32(even, odd));
#else
  for (size_t c = 0; c < LANES; ++c) sums[c] += dot4(x, w + 4 * c);
  return sums;
#endif
}

// Not cloned and not inlined: GCC 12 makes a copy for constant sizes that keeps its accumulators in memory, at half the speed.
#if defined(__clang__)
#define RECMILL_APART __attribute__((noinline))
#else
#define RECMILL_APART __attribute__((noinline, noclone, noipa))
#endif

// tile[i][column] = the product of row i and a panel.
template <int COUNT>
RECMILL_APART void multiply(size_t fours, const uint8_t* x, size_t x_stride, const int8_t* w, int32_t* tile) {
  Ints sums[COUNT][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) sums[i][j] = Ints{};
  // Three rows share one pointer: one for each would not fit the registers.
  const uint8_t* base[(COUNT + 2) / 3];
#pragma GCC unroll 4
  for (int g = 0; g < (COUNT + 2) / 3; ++g) base[g] = x + 3 * g * x_stride;
#pragma GCC unroll 2
  for (size_t k = 0; k < fours; ++k) {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j)
        sums[i][j] = add_products(sums[i][j], base[i / 3] + (i % 3) * x_stride + 4 * k, w + (k * VECTORS + j) * LANES * 4);
  }
#pragma GCC unroll 8
  for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) *reinterpret_cast<UnalignedInts*>(tile + i * PANEL + j * LANES) = sums[i][j];
}

void finish(const ByteLayer& layer, size_t column, const int32_t* tile, const float* bias, size_t rows, void* y, size_t y_stride) {
  for (size_t i = 0; i < rows; ++i)
    for (size_t c = column; c < column + PANEL; c += LANES) {
      const Ints sums = *reinterpret_cast<const UnalignedInts*>(tile + i * PANEL + c - column);
      Vector value = __builtin_convertvector(sums, Vector) * load(layer.scales + c) + load(bias + c);
      value = value > Vector{} ? value : Vector{};
      if (!layer.inverse) {
        store(static_cast<float*>(y) + i * y_stride + c, value);
        continue;
      }
      value = value * load(layer.inverse + c) + 0.5f;
      value = value > 255.0f ? Vector{} + 255.0f : value;
      *reinterpret_cast<UnalignedBytes*>(static_cast<uint8_t*>(y) + i * y_stride + c) =
          __builtin_convertvector(__builtin_convertvector(value, Ints), Bytes);
    }
}

// The largest groups of rows first, then halves for the rest.
template <int MOST>
RECMILL_INLINE void multiply_panel(const ByteLayer& layer, size_t column, size_t row, size_t rows, const uint8_t* x, size_t x_stride,
                                   const float* bias, void* y, size_t y_stride) {
  alignas(64) int32_t tile[MOST * PANEL];
  const size_t size = layer.inverse ? sizeof(uint8_t) : sizeof(float);
  for (; row + MOST <= rows; row += MOST) {
    multiply<MOST>(layer.k / 4, x + row * x_stride, x_stride, layer.packed + column * layer.k, tile);
    finish(layer, column, tile, bias, MOST, static_cast<char*>(y) + row * y_stride * size, y_stride);
  }
  if constexpr (MOST > 1) multiply_panel<MOST / 2>(layer, column, row, rows, x, x_stride, bias, y, y_stride);
}

void byte_layer(const ByteLayer& layer, size_t rows, const uint8_t* x, size_t x_stride, const float* bias, void* y, size_t y_stride) {
  for (size_t column = 0; column < layer.n; column += PANEL) multiply_panel<ROWS>(layer, column, 0, rows, x, x_stride, bias, y, y_stride);
}

#define RECMILL_TEXT(name) RECMILL_TEXT_OF(name)
#define RECMILL_TEXT_OF(name) #name
#define RECMILL_KERNELS(name) RECMILL_KERNELS_OF(name)
#define RECMILL_KERNELS_OF(name) serving_##name

}  // namespace

extern const ServingKernels RECMILL_KERNELS(RECMILL_TARGET);
const ServingKernels RECMILL_KERNELS(RECMILL_TARGET) = {
    RECMILL_TEXT(RECMILL_TARGET), PANEL, gather, add_rows, pair_dots, to_bytes, byte_layer};

}  // namespace dense
