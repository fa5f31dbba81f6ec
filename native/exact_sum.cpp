// Exact sums of doubles and of their squares, so that no order of addition changes a mean or a deviation.
// A sum is an integer multiple of the smallest double (of its square for squares), kept in base 2^32 with
// signed 64-bit digits: a digit takes 2^31 additions before it could overflow.
#include <nanobind/stl/optional.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "arrays.hpp"

namespace {

constexpr size_t SUM_DIGITS = 68;      // 2046 + 53 bits, and room for the carry
constexpr size_t SQUARE_DIGITS = 134;  // 4092 + 106 bits, and room for the carry

// Adds mantissa * 2^shift * sign.
void accumulate(int64_t* digits, unsigned __int128 mantissa, int shift, int sign) {
  size_t digit = static_cast<size_t>(shift / 32);
  const int within = shift % 32;
  // The first digit holds what fits above `within`; the rest follows in whole digits.
  digits[digit] += sign * static_cast<int64_t>((static_cast<uint64_t>(mantissa) << within) & 0xffffffffull);
  mantissa >>= 32 - within;
  for (++digit; mantissa; ++digit, mantissa >>= 32) digits[digit] += sign * static_cast<int64_t>(mantissa & 0xffffffffull);
}

// (finite count, digits of the sum, digits of the sum of squares, min, max); missing and non-finite values are left out.
nb::tuple exact_moments(In<double> values, Mask mask) {
  const size_t rows = values.size();
  if (rows >= (1ull << 31)) throw std::invalid_argument("at most 2^31 - 1 values at a time");
  const uint8_t* valid = mask_data(mask, rows);
  std::vector<int64_t> sum(SUM_DIGITS), squares(SQUARE_DIGITS);
  int64_t count = 0;
  double low = std::numeric_limits<double>::infinity(), high = -low;
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < rows; ++i) {
      const double value = values.data()[i];
      if ((valid && !valid[i]) || !std::isfinite(value)) continue;
      ++count;
      low = std::min(low, value);
      high = std::max(high, value);
      if (value == 0) continue;
      uint64_t bits;
      std::memcpy(&bits, &value, 8);
      const int exponent = static_cast<int>((bits >> 52) & 0x7ff);
      const uint64_t fraction = bits & ((1ull << 52) - 1);
      const uint64_t mantissa = exponent ? fraction | (1ull << 52) : fraction;
      const int shift = exponent ? exponent - 1 : 0;
      accumulate(sum.data(), mantissa, shift, value < 0 ? -1 : 1);
      accumulate(squares.data(), static_cast<unsigned __int128>(mantissa) * mantissa, 2 * shift, 1);
    }
  }
  return nb::make_tuple(count, to_numpy(std::move(sum)), to_numpy(std::move(squares)), low, high);
}

}  // namespace

void register_exact_sum(nb::module_& m) {
  m.def("exact_moments", &exact_moments, nb::arg("values"), nb::arg("mask").none());
}
