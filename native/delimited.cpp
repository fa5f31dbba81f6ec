// Delimited text -> column buffers in Arrow's layout. A row is split into fields, then each field is parsed by
// its kind; a row with a problem is set aside whole, with its byte range and the reason.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace nb = nanobind;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// ---------------------------------------------------------------------------------------------- values

struct Field {
  const char* begin;
  const char* end;

  size_t size() const { return static_cast<size_t>(end - begin); }
  bool empty() const { return begin == end; }
};

// The bytes of a field, one of each pair of quotes if it holds `doubled` ones: then they only come in pairs, and
// the byte before the field is the quote itself.
template <class Use>
void each_byte(Field field, bool doubled, Use use) {
  for (const char* p = field.begin; p != field.end; ++p) {
    use(*p);
    if (doubled && *p == field.begin[-1]) ++p;
  }
}

constexpr bool kLittleEndian = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

inline uint64_t load8(const char* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Up to 8 digits in one go. Reads 8 bytes, whatever the size.
inline bool parse_short_digits(const char* begin, size_t size, uint64_t& out) {
  const unsigned missing = static_cast<unsigned>(8 - size) * 8;
  uint64_t word = load8(begin) << missing;
  word |= missing == 0 ? 0 : 0x3030303030303030ULL >> (64 - missing);
  const uint64_t high = word & 0xF0F0F0F0F0F0F0F0ULL;
  const uint64_t carried = (word + 0x0606060606060606ULL) & 0xF0F0F0F0F0F0F0F0ULL;
  if (((high ^ 0x3030303030303030ULL) | (carried ^ 0x3030303030303030ULL)) != 0) return false;
  word = ((word & 0x0F0F0F0F0F0F0F0FULL) * 2561) >> 8;
  word = ((word & 0x00FF00FF00FF00FFULL) * 6553601) >> 16;
  out = ((word & 0x0000FFFF0000FFFFULL) * 42949672960001ULL) >> 32;
  return true;
}

// Digits, then nothing or a point followed by zeros only.
bool parse_long_digits(const char* p, const char* end, uint64_t limit, uint64_t& out) {
  if (p == end || !is_digit(*p)) return false;
  uint64_t value = 0;
  for (; p != end && is_digit(*p); ++p) {
    const uint64_t digit = static_cast<uint64_t>(*p - '0');
    if (value > (limit - digit) / 10) return false;
    value = value * 10 + digit;
  }
  out = value;
  if (p == end) return true;
  return *p == '.' && end - p > 1 && std::all_of(p + 1, end, [](char c) { return c == '0'; });
}

[[gnu::always_inline]] inline bool parse_int(Field field, const char* readable, int64_t& out) {
  const bool negative = *field.begin == '-';
  const char* digits = field.begin + (negative || *field.begin == '+');
  const size_t size = static_cast<size_t>(field.end - digits);
  uint64_t value = 0;
  const bool is_short = kLittleEndian && size - 1 < 8 && digits + 8 <= readable;
  if (!is_short || !parse_short_digits(digits, size, value)) {
    const uint64_t limit = static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) + negative;
    if (!parse_long_digits(digits, field.end, limit, value)) return false;
  }
  out = static_cast<int64_t>(negative ? 0 - value : value);
  return true;
}

bool parse_float(Field field, double& out) {
  const char* begin = field.begin + (*field.begin == '+');
  const char* first = begin + (begin == field.begin && *begin == '-');
  // from_chars also takes "nan" and "inf", which no log means.
  if (first == field.end || !(is_digit(*first) || *first == '.')) return false;
  const auto [stopped, error] = std::from_chars(begin, field.end, out);
  return error == std::errc() && stopped == field.end;
}

inline int hex_digit(char c) {
  if (is_digit(c)) return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

inline uint64_t bytes_at_least(uint64_t word, uint64_t least) {
  return word + 0x0101010101010101ULL * (0x80 - least);  // the answer is each byte's top bit
}

// Exactly 8 digits, the usual case, without a branch for each digit.
inline bool parse_hex8(const char* begin, int64_t& out) {
  const uint64_t tops = 0x8080808080808080ULL;
  uint64_t word = load8(begin);
  if ((word & tops) != 0) return false;
  const uint64_t lower = word | 0x2020202020202020ULL;
  const uint64_t digits = bytes_at_least(word, '0') & ~bytes_at_least(word, '9' + 1);
  const uint64_t letters = bytes_at_least(lower, 'a') & ~bytes_at_least(lower, 'f' + 1);
  if (((digits | letters) & tops) != tops) return false;
  word = (word & 0x0F0F0F0F0F0F0F0FULL) + 9 * ((word >> 6) & 0x0101010101010101ULL);
  word = __builtin_bswap64(word);
  word = (word | (word >> 4)) & 0x00FF00FF00FF00FFULL;
  word = (word | (word >> 8)) & 0x0000FFFF0000FFFFULL;
  out = static_cast<int64_t>((word | (word >> 16)) & 0xFFFFFFFFULL);
  return true;
}

bool parse_any_hex(Field field, int64_t& out) {
  const char* p = field.begin;
  if (field.size() > 2 && p[0] == '0' && (p[1] | 0x20) == 'x') p += 2;
  if (field.end - p > 16) return false;
  uint64_t value = 0;
  for (; p != field.end; ++p) {
    const int digit = hex_digit(*p);
    if (digit < 0) return false;
    value = value << 4 | static_cast<uint64_t>(digit);
  }
  out = static_cast<int64_t>(value);
  return true;
}

[[gnu::always_inline]] inline bool parse_hex(Field field, int64_t& out) {
  if (kLittleEndian && field.size() == 8 && parse_hex8(field.begin, out)) return true;
  return parse_any_hex(field, out);
}

bool parse_bool(Field field, int64_t& out) {
  const std::string_view text(field.begin, field.size());
  out = text == "1" || text == "true" || text == "True";
  return out != 0 || text == "0" || text == "false" || text == "False";
}

bool is_ascii(const char* p, size_t size) {
  uint64_t seen = 0;
  for (; size >= 8; p += 8, size -= 8) seen |= load8(p);
  for (; size > 0; ++p, --size) seen |= static_cast<uint8_t>(*p);
  return (seen & 0x8080808080808080ULL) == 0;
}

// The least and greatest second byte that make a lead byte's sequence shortest, in range and no surrogate.
bool second_byte_fits(uint8_t lead, uint8_t second) {
  const uint8_t least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  return second >= least && second <= most;
}

bool is_utf8(const char* text, size_t size) {
  const auto* p = reinterpret_cast<const uint8_t*>(text);
  const auto* end = p + size;
  while (p != end) {
    const uint8_t lead = *p++;
    if (lead < 0x80) continue;
    if (lead < 0xC2 || lead > 0xF4) return false;
    const int following = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
    if (end - p < following || !second_byte_fits(lead, p[0])) return false;
    for (int i = 1; i < following; ++i)
      if ((p[i] & 0xC0) != 0x80) return false;
    p += following;
  }
  return true;
}

// --------------------------------------------------------------------------------------------- splitting

// Which of the 64 bytes at `p` are `byte`, as bits.
struct Masks {
  uint64_t separators = 0;
  uint64_t newlines = 0;
};

inline Masks scan64(const char* p, char separator) {
  Masks masks;
#if defined(__SSE2__)
  const __m128i separators = _mm_set1_epi8(separator);
  const __m128i newlines = _mm_set1_epi8('\n');
  for (int part = 0; part < 4; ++part) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * part));
    const auto is_separator = static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, separators)));
    const auto is_newline = static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, newlines)));
    masks.separators |= static_cast<uint64_t>(is_separator) << (16 * part);
    masks.newlines |= static_cast<uint64_t>(is_newline) << (16 * part);
  }
#else
  for (int i = 0; i < 64; ++i) {
    masks.separators |= static_cast<uint64_t>(p[i] == separator) << i;
    masks.newlines |= static_cast<uint64_t>(p[i] == '\n') << i;
  }
#endif
  return masks;
}

Masks scan_last(const char* p, const char* end, char separator) {
  const size_t size = static_cast<size_t>(end - p);
  if (size >= 64) return scan64(p, separator);
  char padded[64] = {};
  std::memcpy(padded, p, size);
  Masks masks = scan64(padded, separator);
  const uint64_t inside = (uint64_t{1} << size) - 1;
  return {masks.separators & inside, masks.newlines & inside};
}

const char* find_newline(const char* p, const char* end) {
  const void* found = p == end ? nullptr : std::memchr(p, '\n', static_cast<size_t>(end - p));
  return found ? static_cast<const char*>(found) : end;
}

// Cuts one row at a time into fields. Keeps at most `max_fields`, but counts them all.
class Splitter {
 public:
  Splitter(const std::string& separator, const std::string& quote, size_t max_fields, const char* end, bool final)
      : separator_(separator),
        quote_(quote.empty() ? '\0' : quote[0]),
        fields_(max_fields),
        doubled_(max_fields),
        end_(end),
        final_(final) {
    split_ = !quote.empty() ? &Splitter::split_quoted
             : separator.size() == 1 ? &Splitter::split_simple
                                     : &Splitter::split_wide;
  }

  // Returns where the next row starts, or null when this one has no end yet.
  const char* split(const char* row) {
    count_ = 0;
    problem_ = nullptr;
    const char* next = (this->*split_)(row);
    if (next == nullptr && final_) return unclosed(row);
    return next;
  }

  size_t count() const { return count_; }
  Field field(size_t i) const { return fields_[i]; }
  bool is_doubled(size_t i) const { return doubled_[i] != 0; }
  const char* problem() const { return problem_; }

 private:
  void add(const char* begin, const char* end) {
    if (count_ < fields_.size()) fields_[count_] = {begin, end};
    ++count_;
  }

  // The last field ends at `at`, a newline or the end of the text; a carriage return before it is no part of it.
  const char* finish(const char* field, const char* at) {
    add(field, at > field && at[-1] == '\r' ? at - 1 : at);
    return at == end_ ? end_ : at + 1;
  }

  const char* split_simple(const char* row) {
    const char* field = row;
    for (const char* block = row;; block += 64) {
      Masks masks = scan_last(block, end_, separator_[0]);
      const bool ends_here = masks.newlines != 0;
      if (ends_here) masks.separators &= masks.newlines ^ (masks.newlines - 1);
      for (; masks.separators != 0; masks.separators &= masks.separators - 1) {
        const char* at = block + __builtin_ctzll(masks.separators);
        add(field, at);
        field = at + 1;
      }
      if (ends_here) return finish(field, block + __builtin_ctzll(masks.newlines));
      if (end_ - block <= 64) return final_ ? finish(field, end_) : nullptr;
    }
  }

  const char* split_wide(const char* row) {
    const char* row_end = find_newline(row, end_);
    if (row_end == end_ && !final_) return nullptr;
    const char* field = row;
    for (;;) {
      const char* at = std::search(field, row_end, separator_.begin(), separator_.end());
      if (at == row_end) return finish(field, row_end);
      add(field, at);
      field = at + separator_.size();
    }
  }

  bool separator_at(const char* p) const {
    if (*p != separator_[0]) return false;
    const size_t left = static_cast<size_t>(end_ - p);
    return left >= separator_.size() && std::memcmp(p, separator_.data(), separator_.size()) == 0;
  }

  const char* find_field_end(const char* p) const {
    while (p != end_ && *p != '\n' && !separator_at(p)) ++p;
    return p;
  }

  const char* split_quoted(const char* row) {
    std::fill(doubled_.begin(), doubled_.end(), 0);
    const char* p = row;
    for (;;) {
      const char* begin = p;
      const bool quoted = p != end_ && *p == quote_;
      p = quoted ? add_quoted(p + 1) : find_field_end(p);
      if (p == nullptr || (p == end_ && !final_)) return nullptr;
      const bool at_row_end = p == end_ || *p == '\n';
      if (at_row_end && !quoted) return finish(begin, p);
      if (at_row_end) return p == end_ ? end_ : p + 1;
      if (!quoted) add(begin, p);
      p += separator_.size();
    }
  }

  // `begin` is behind the opening quote. Returns the end of the field, or null if the quote is still open.
  const char* add_quoted(const char* begin) {
    bool doubled = false;
    const char* p = begin;
    for (;;) {
      p = p == end_ ? nullptr : static_cast<const char*>(std::memchr(p, quote_, static_cast<size_t>(end_ - p)));
      if (p == nullptr) return nullptr;
      if (p + 1 == end_ || p[1] != quote_) break;
      doubled = true;
      p += 2;
    }
    if (count_ < doubled_.size()) doubled_[count_] = doubled;
    add(begin, p);
    const char* field_end = find_field_end(p + 1);
    const char* behind = p + 1;
    const bool only_return = field_end - behind == 1 && *behind == '\r' && (field_end == end_ || *field_end == '\n');
    if (field_end != behind && !only_return) problem_ = "text after a closing quote";
    return field_end;
  }

  // Sets aside only the line with the opening quote, so that one stray quote does not cost the rest of the file.
  const char* unclosed(const char* row) {
    problem_ = "quote never closed";
    const char* at = find_newline(row, end_);
    return at == end_ ? end_ : at + 1;
  }

  const std::string separator_;
  const char quote_;
  std::vector<Field> fields_;
  std::vector<char> doubled_;  // which fields hold doubled quotes, still to be made single
  const char* const end_;
  const bool final_;
  const char* (Splitter::*split_)(const char*);
  size_t count_ = 0;
  const char* problem_ = nullptr;
};

// ----------------------------------------------------------------------------------------------- columns

// A block of memory that ends up owned by a NumPy array.
class Buffer {
 public:
  Buffer() = default;
  // `shift` keeps columns off each other's cache sets: large blocks all start at the same place of a page.
  Buffer(size_t size, size_t shift) : block_(allocate(nullptr, size + shift)), shift_(shift), size_(size) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() { std::free(block_); }

  explicit operator bool() const { return block_ != nullptr; }
  char* data() const { return block_ + shift_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }

  void reserve(size_t size) {
    if (size <= size_) return;
    size_ = std::max(size, size_ * 2);
    block_ = allocate(block_, size_ + shift_);
  }

  nb::object give(size_t size) {
    auto* owner = new Buffer(std::move(*this));
    nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<Buffer*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(owner->data(), {size}, capsule));
  }

 private:
  static char* allocate(char* block, size_t size) {
    auto* grown = static_cast<char*>(std::realloc(block, size));
    if (grown == nullptr) throw std::bad_alloc();
    return grown;
  }
  void swap(Buffer& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(shift_, other.shift_);
    std::swap(size_, other.size_);
  }

  char* block_ = nullptr;
  size_t shift_ = 0;
  size_t size_ = 0;
};

enum class Kind { Int, Float, Text, Hex, Bool };

Kind kind_of(const std::string& name) {
  if (name == "int") return Kind::Int;
  if (name == "float") return Kind::Float;
  if (name == "text") return Kind::Text;
  if (name == "hex") return Kind::Hex;
  if (name == "bool") return Kind::Bool;
  throw std::invalid_argument("no such column type: " + name);
}

constexpr const char* kNotAllowed = "value not allowed";

// What a recipe says about one column. The allowed values are sorted.
struct ColumnSpec {
  Kind kind;
  size_t field;
  bool required;
  bool limited;
  std::vector<int64_t> integers;
  std::vector<double> floats;
  std::vector<std::string> texts;

  const char* check(int64_t value) const { return check_in(integers, value); }
  const char* check(double value) const { return check_in(floats, value); }
  const char* check(std::string_view value) const { return check_in(texts, value); }

 private:
  template <class T, class V>
  const char* check_in(const std::vector<T>& allowed, const V& value) const {
    if (!limited || std::binary_search(allowed.begin(), allowed.end(), value)) return nullptr;
    return kNotAllowed;
  }
};

inline void set_bit(char* bits, size_t i, bool on) {
  const char bit = static_cast<char>(1 << (i & 7));
  bits[i >> 3] = static_cast<char>(on ? bits[i >> 3] | bit : bits[i >> 3] & ~bit);
}

// One column under construction. Writing row `n` again overwrites it, which is how a bad row is taken back.
class ColumnBuilder {
 public:
  ColumnBuilder(const ColumnSpec& spec, size_t capacity, size_t index, bool latin1)
      : spec_(spec), capacity_(capacity), shift_(64 * (index % 64)), latin1_(latin1) {
    values_ = Buffer((capacity + 1) * 8, shift_);
    if (spec.kind == Kind::Text) values_.as<int64_t>()[0] = 0;
    if (spec.kind == Kind::Bool) std::memset(values_.data(), 0, capacity / 8 + 1);
  }

  // Returns what is wrong with the field, or null.
  const char* write(size_t n, Field field, bool doubled, const char* readable) {
    if (field.empty()) return write_null(n);
    if (validity_) set_bit(validity_.data(), n, true);
    switch (spec_.kind) {
      case Kind::Int: {
        int64_t& value = values_.as<int64_t>()[n];
        return parse_int(field, readable, value) ? spec_.check(value) : "not an integer";
      }
      case Kind::Hex: {
        int64_t& value = values_.as<int64_t>()[n];
        return parse_hex(field, value) ? spec_.check(value) : "not hexadecimal";
      }
      case Kind::Float: {
        double& value = values_.as<double>()[n];
        return parse_float(field, value) ? spec_.check(value) : "not a number";
      }
      case Kind::Bool: return write_bool(n, field);
      case Kind::Text: return write_text(n, field, doubled);
    }
    return nullptr;
  }

  nb::object finish(size_t num_rows) {
    nb::object validity = nb::none();
    if (validity_) validity = validity_.give((num_rows + 7) / 8);
    if (spec_.kind == Kind::Text) {
      const auto num_bytes = static_cast<size_t>(values_.as<int64_t>()[num_rows]);
      text_.reserve(1);
      return nb::make_tuple(validity, values_.give((num_rows + 1) * 8), text_.give(num_bytes));
    }
    const size_t size = spec_.kind == Kind::Bool ? (num_rows + 7) / 8 : num_rows * 8;
    return nb::make_tuple(validity, values_.give(size));
  }

 private:
  const char* write_null(size_t n) {
    if (spec_.required) return "missing required value";
    if (!validity_) {
      validity_ = Buffer(capacity_ / 8 + 1, 0);
      std::memset(validity_.data(), 0xFF, capacity_ / 8 + 1);
    }
    set_bit(validity_.data(), n, false);
    if (spec_.kind == Kind::Text) values_.as<int64_t>()[n + 1] = values_.as<int64_t>()[n];
    else if (spec_.kind == Kind::Bool) set_bit(values_.data(), n, false);
    else values_.as<int64_t>()[n] = 0;
    return nullptr;
  }

  const char* write_bool(size_t n, Field field) {
    int64_t value = 0;
    if (!parse_bool(field, value)) return "not a boolean";
    set_bit(values_.data(), n, value != 0);
    return spec_.check(value);
  }

  const char* write_text(size_t n, Field field, bool doubled) {
    int64_t* offsets = values_.as<int64_t>();
    const auto start = static_cast<size_t>(offsets[n]);
    text_.reserve(start + (latin1_ ? 2 : 1) * field.size());  // a latin-1 letter may take two bytes
    char* out = text_.data() + start;
    const bool ascii = is_ascii(field.begin, field.size());
    if (!ascii && !latin1_ && !is_utf8(field.begin, field.size())) return "invalid UTF-8";
    const size_t written = ascii || !latin1_ ? copy(field, doubled, out) : transcode(field, doubled, out);
    offsets[n + 1] = static_cast<int64_t>(start + written);
    return spec_.check(std::string_view(out, written));
  }

  static size_t copy(Field field, bool doubled, char* out) {
    if (!doubled) {
      std::memcpy(out, field.begin, field.size());
      return field.size();
    }
    char* to = out;
    each_byte(field, true, [&](char byte) { *to++ = byte; });
    return static_cast<size_t>(to - out);
  }

  static size_t transcode(Field field, bool doubled, char* out) {
    char* to = out;
    each_byte(field, doubled, [&](char letter) {
      const auto byte = static_cast<uint8_t>(letter);
      if (byte >= 0x80) *to++ = static_cast<char>(0xC0 | byte >> 6);
      *to++ = static_cast<char>(byte < 0x80 ? byte : 0x80 | (byte & 0x3F));
    });
    return static_cast<size_t>(to - out);
  }

  const ColumnSpec& spec_;
  const size_t capacity_;
  const size_t shift_;
  const bool latin1_;
  Buffer values_;    // values; offsets of text; bits of bool
  Buffer validity_;  // only when there are nulls
  Buffer text_;
};

// ------------------------------------------------------------------------------------------------ parser

struct BadRow {
  size_t begin;
  size_t end;
  const char* reason;
  int column;  // -1 when the row as a whole is wrong
};

size_t count_newlines_in(const char* p, const char* end) {
  size_t total = 0;
  while (p != end) {
    // A one-byte count that cannot overflow lets the compiler use full vectors of bytes.
    const char* stop = p + std::min<ptrdiff_t>(end - p, 255);
    uint8_t count = 0;
    for (; p != stop; ++p) count = static_cast<uint8_t>(count + (*p == '\n'));
    total += count;
  }
  return total;
}

struct Rows {
  Buffer positions;
  std::vector<ColumnBuilder> columns;
  std::vector<BadRow> bad;
  size_t num_good = 0;
  size_t consumed = 0;
};

class DelimitedParser {
 public:
  DelimitedParser(nb::bytes separator, nb::bytes quote, bool latin1, size_t num_fields, nb::list columns)
      : separator_(separator.c_str(), separator.size()),
        quote_(quote.c_str(), quote.size()),
        latin1_(latin1),
        num_fields_(num_fields) {
    for (nb::handle column : columns) columns_.push_back(spec_of(nb::cast<nb::tuple>(column)));
    empty_line_is_a_row_ = num_fields == 1 && columns_.size() == 1 && columns_[0].kind == Kind::Text;
  }

  // Parses rows that start before `stop`; the last one without a newline only if `final`.
  nb::object parse(const Bytes& text, size_t stop, bool final, int64_t position, size_t max_bad) const {
    const char* begin = reinterpret_cast<const char*>(text.data());
    Rows rows;
    {
      nb::gil_scoped_release without_gil;
      rows = parse_rows(begin, begin + text.shape(0), std::min(stop, text.shape(0)), final, position, max_bad);
    }
    nb::list columns, bad;
    for (ColumnBuilder& column : rows.columns) columns.append(column.finish(rows.num_good));
    for (const BadRow& row : rows.bad)
      bad.append(nb::make_tuple(row.begin, row.end, row.reason, row.column));
    nb::object positions = rows.positions.give(rows.num_good * 8);
    return nb::make_tuple(rows.consumed, rows.num_good, positions, columns, bad);
  }

 private:
  static ColumnSpec spec_of(const nb::tuple& column) {
    ColumnSpec spec{kind_of(nb::cast<std::string>(column[0])), nb::cast<size_t>(column[1]), nb::cast<bool>(column[2]),
                    !column[3].is_none(), {}, {}, {}};
    if (!spec.limited) return spec;
    if (spec.kind == Kind::Text) spec.texts = nb::cast<std::vector<std::string>>(column[3]);
    else if (spec.kind == Kind::Float) spec.floats = nb::cast<std::vector<double>>(column[3]);
    else spec.integers = nb::cast<std::vector<int64_t>>(column[3]);
    std::sort(spec.texts.begin(), spec.texts.end());
    std::sort(spec.floats.begin(), spec.floats.end());
    std::sort(spec.integers.begin(), spec.integers.end());
    return spec;
  }

  Rows parse_rows(const char* begin, const char* end, size_t stop, bool final, int64_t position,
                  size_t max_bad) const {
    Rows rows;
    // A row that gets as far as a column has a byte for each field: its separator or newline.
    const size_t capacity =
        std::min(count_newlines_in(begin, end), static_cast<size_t>(end - begin) / std::max<size_t>(num_fields_, 1)) + 1;
    rows.positions = Buffer(capacity * 8, 64 * (columns_.size() % 64));
    for (size_t i = 0; i < columns_.size(); ++i) rows.columns.emplace_back(columns_[i], capacity, i, latin1_);
    Splitter splitter(separator_, quote_, num_fields_, end, final);
    const char* row = begin;
    while (row < begin + stop && rows.bad.size() < max_bad) {
      const char* next = splitter.split(row);
      if (next == nullptr) break;
      int column = -1;
      const char* reason = write_row(splitter, row, next, end, rows, column);
      const auto offset = static_cast<size_t>(row - begin);
      if (reason) rows.bad.push_back({offset, static_cast<size_t>(next - begin), reason, column});
      else rows.positions.as<int64_t>()[rows.num_good++] = position + static_cast<int64_t>(offset);
      row = next;
    }
    rows.consumed = static_cast<size_t>(row - begin);
    return rows;
  }

  const char* write_row(const Splitter& splitter, const char* row, const char* next, const char* end, Rows& rows,
                        int& column) const {
    if (splitter.problem()) return splitter.problem();
    if (splitter.count() != num_fields_) return "wrong number of fields";
    if (num_fields_ == 1 && !empty_line_is_a_row_ && is_empty_line(row, next)) return "wrong number of fields";
    for (size_t i = 0; i < columns_.size(); ++i) {
      const size_t from = columns_[i].field;
      const char* reason =
          rows.columns[i].write(rows.num_good, splitter.field(from), splitter.is_doubled(from), end);
      if (reason) {
        column = static_cast<int>(i);
        return reason;
      }
    }
    return nullptr;
  }

  static bool is_empty_line(const char* row, const char* next) {
    return std::all_of(row, next, [](char c) { return c == '\r' || c == '\n'; }) && next - row <= 2;
  }

  const std::string separator_;
  const std::string quote_;
  const bool latin1_;
  const size_t num_fields_;
  std::vector<ColumnSpec> columns_;
  bool empty_line_is_a_row_ = false;
};

// ------------------------------------------------------------------------------------------ free functions

// The fields of the first row and its length, or None if it has no end yet.
nb::object split_row(const Bytes& text, nb::bytes separator, nb::bytes quote, bool final) {
  constexpr size_t kMaxFields = 1 << 16;
  const char* begin = reinterpret_cast<const char*>(text.data());
  Splitter splitter({separator.c_str(), separator.size()}, {quote.c_str(), quote.size()}, kMaxFields,
                    begin + text.shape(0), final);
  const char* next = splitter.split(begin);
  if (next == nullptr) return nb::none();
  nb::list fields;
  for (size_t i = 0; i < std::min(splitter.count(), kMaxFields); ++i) {
    std::string field;
    each_byte(splitter.field(i), splitter.is_doubled(i), [&](char byte) { field.push_back(byte); });
    fields.append(nb::bytes(field.data(), field.size()));
  }
  return nb::make_tuple(fields, next - begin);
}

size_t count_newlines(const Bytes& text) {
  nb::gil_scoped_release without_gil;
  const char* begin = reinterpret_cast<const char*>(text.data());
  return count_newlines_in(begin, begin + text.shape(0));
}

// Where each of the first `max_lines` lines that start before `stop` starts, and where the last of them ends.
nb::object line_starts(const Bytes& text, size_t stop, bool final, size_t max_lines) {
  const char* begin = reinterpret_cast<const char*>(text.data());
  const char* end = begin + text.shape(0);
  auto* starts = new std::vector<int64_t>{0};
  nb::capsule owner(starts, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  {
    nb::gil_scoped_release without_gil;
    const char* line = begin;
    while (line < end && static_cast<size_t>(line - begin) < stop && starts->size() <= max_lines) {
      const char* at = find_newline(line, end);
      if (at == end && !final) break;
      line = at == end ? end : at + 1;
      starts->push_back(line - begin);
    }
  }
  return nb::cast(nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(starts->data(), {starts->size()}, owner));
}

bool parse_one(Kind kind, Field field, int64_t& integer, double& number) {
  if (kind == Kind::Text) return is_utf8(field.begin, field.size());
  if (field.empty()) return false;
  if (kind == Kind::Int) return parse_int(field, field.end, integer);
  if (kind == Kind::Float) return parse_float(field, number);
  return kind == Kind::Hex ? parse_hex(field, integer) : parse_bool(field, integer);
}

// Strings -> values (int64, or double for "float") and which of them could be read. Text is only checked.
nb::object parse_text(const std::string& kind_name, const Offsets& offsets, const Bytes& text) {
  const Kind kind = kind_of(kind_name);
  const size_t size = offsets.shape(0) - 1;
  const char* begin = reinterpret_cast<const char*>(text.data());
  Buffer values(size * 8 + 8, 0), readable(size + 1, 0);
  {
    nb::gil_scoped_release without_gil;
    for (size_t i = 0; i < size; ++i) {
      const Field field{begin + offsets.data()[i], begin + offsets.data()[i + 1]};
      int64_t& value = values.as<int64_t>()[i];
      value = 0;
      readable.data()[i] = parse_one(kind, field, value, values.as<double>()[i]);
    }
  }
  return nb::make_tuple(values.give(size * 8), readable.give(size));
}

}  // namespace

void register_delimited(nb::module_& m) {
  nb::class_<DelimitedParser>(m, "DelimitedParser")
      .def(nb::init<nb::bytes, nb::bytes, bool, size_t, nb::list>())
      .def("parse", &DelimitedParser::parse, nb::arg("text"), nb::arg("stop"), nb::arg("final"), nb::arg("position"),
           nb::arg("max_bad"));
  m.def("split_row", &split_row, nb::arg("text"), nb::arg("separator"), nb::arg("quote"), nb::arg("final"));
  m.def("count_newlines", &count_newlines, nb::arg("text"));
  m.def("line_starts", &line_starts, nb::arg("text"), nb::arg("stop"), nb::arg("final"), nb::arg("max_lines"));
  m.def("parse_text", &parse_text, nb::arg("kind"), nb::arg("offsets"), nb::arg("text"));
}
