// gzip (RFC 1951, 1952) decompressed as a stream that can be entered again: at block boundaries it leaves marks, each
// with the 32 KB of text before it, and a stream may begin at any mark instead of at the beginning of the file.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace gzip {

constexpr size_t WINDOW = 32 << 10;

struct Damaged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where decompression may begin: the offset in the text, the bit of the file, and the text before it.
struct Mark {
  uint64_t offset;
  uint64_t bit;
  std::string window;
};

// Code -> symbol. Codes of up to FIRST_BITS are looked up at once, longer ones in a second table.
class Codes {
 public:
  static constexpr int FIRST_BITS = 10;
  struct Entry {
    uint16_t value = 0;    // a symbol, or where the second table begins
    uint8_t length = 0;    // bits of the whole code; 0: no code begins like this
    uint8_t more_bits = 0; // of the second table
  };

  // False when the lengths are no complete set of codes; a single code of one bit is allowed, and so is none.
  bool build(const uint8_t* lengths, size_t symbols) {
    std::array<uint16_t, 17> count{}, next{};
    for (size_t s = 0; s < symbols; ++s) ++count[lengths[s]];
    const size_t used = symbols - count[0];
    count[0] = 0;
    uint32_t code = 0;
    for (int bits = 1; bits <= 15; ++bits) {
      code = (code + count[bits - 1]) << 1;
      if (code + count[bits] > (1u << bits)) return false;
      next[bits] = static_cast<uint16_t>(code);
    }
    const bool is_complete = code + count[15] == (1u << 15);
    if (!is_complete && !(used == 0 || (used == 1 && count[1] == 1))) return false;
    entries_.assign(size_t{1} << FIRST_BITS, Entry{});
    std::array<uint8_t, 1 << FIRST_BITS> longest{};
    std::array<uint16_t, 320> reversed{};
    for (size_t s = 0; s < symbols; ++s) {
      if (!lengths[s]) continue;
      reversed[s] = reverse(next[lengths[s]]++, lengths[s]);
      auto& most = longest[reversed[s] & (longest.size() - 1)];
      most = std::max(most, lengths[s]);
    }
    for (size_t s = 0; s < symbols; ++s) {
      if (lengths[s]) place(reversed[s], lengths[s], static_cast<uint16_t>(s), longest[reversed[s] & (longest.size() - 1)]);
    }
    return true;
  }

  Entry find(uint64_t bits) const {
    Entry entry = entries_[bits & ((1u << FIRST_BITS) - 1)];
    if (entry.more_bits) entry = entries_[entry.value + ((bits >> FIRST_BITS) & ((1u << entry.more_bits) - 1))];
    return entry;
  }

 private:
  static uint16_t reverse(uint32_t code, int bits) {
    uint32_t result = 0;
    for (int i = 0; i < bits; ++i) result |= ((code >> i) & 1) << (bits - 1 - i);
    return static_cast<uint16_t>(result);
  }

  void place(uint16_t code, int length, uint16_t symbol, int longest) {
    const Entry entry{symbol, static_cast<uint8_t>(length), 0};
    size_t begin = 0, bits = FIRST_BITS;
    if (length > FIRST_BITS) {
      Entry& first = entries_[code & ((1u << FIRST_BITS) - 1)];
      if (!first.more_bits) {
        first = {static_cast<uint16_t>(entries_.size()), 0, static_cast<uint8_t>(longest - FIRST_BITS)};
        begin = first.value, bits = first.more_bits;
        entries_.resize(entries_.size() + (size_t{1} << bits));
      } else {
        begin = first.value, bits = first.more_bits;
      }
      code >>= FIRST_BITS, length -= FIRST_BITS;
    }
    for (size_t at = code; at < (size_t{1} << bits); at += size_t{1} << length) entries_[begin + at] = entry;
  }

  std::vector<Entry> entries_;
};

class Stream {
 public:
  Stream() : in_(PADDING), out_(WINDOW + CHUNK + SLACK) {}

  // Begins in the middle of a file: what is fed begins with the byte of the mark's bit.
  explicit Stream(const Mark& mark) : Stream() {
    if (mark.window.size() > WINDOW) throw std::invalid_argument("a mark's window is too long");
    std::memcpy(out_.data(), mark.window.data(), mark.window.size());
    begin_ = end_ = checked_ = mark.window.size();
    offset_ = mark.offset;
    base_ = mark.bit >> 3;
    at_ = mark.bit & 7;
    state_ = State::block;
    is_whole_member_ = false;
  }

  // More of the file; nothing at all means that it has ended.
  void feed(const uint8_t* bytes, size_t size) {
    if (size == 0) { has_ended_ = true; return; }
    in_.resize(in_size_);
    const size_t used = std::min<size_t>(at_ >> 3, in_size_);
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(used));
    base_ += used;
    at_ -= used << 3;
    in_.insert(in_.end(), bytes, bytes + size);
    in_size_ = in_.size();
    in_.resize(in_size_ + PADDING, 0);
  }

  // Some text, as long as it lasts: 0 when more must be fed, or when all is read.
  size_t read(uint8_t* into, size_t room) {
    if (begin_ == end_) decompress();
    const size_t size = std::min(room, end_ - begin_);
    std::memcpy(into, out_.data() + begin_, size);
    begin_ += size;
    return size;
  }

  bool is_finished() const { return state_ == State::done && begin_ == end_; }

  // Leave marks from now on, each at the first block boundary that is so many bytes of text after the one before.
  void mark_every(uint64_t spacing) { spacing_ = spacing, next_mark_ = offset_ + spacing; }

  std::vector<Mark> take_marks() { return std::move(marks_); }

 private:
  enum class State { header, block, stored, codes, trailer, padding, done };
  static constexpr size_t CHUNK = 256 << 10, LONGEST_MATCH = 258, SLACK = LONGEST_MATCH + 64;
  static constexpr size_t PADDING = 32, LONGEST_BLOCK_HEADER = 1024, LONGEST_HEADER = 1 << 20;

  void decompress() {
    if (end_ > WINDOW) {  // matches reach back this far
      std::memmove(out_.data(), out_.data() + end_ - WINDOW, WINDOW);
      begin_ = end_ = checked_ = WINDOW;
    }
    while (state_ != State::done && end_ < WINDOW + CHUNK && step()) {}
    checksum();
  }

  // One header, block or run of symbols. False when more of the file is needed.
  bool step() {
    switch (state_) {
      case State::header: return read_header();
      case State::block: return begin_block();
      case State::stored: return copy_stored();
      case State::codes: return decode();
      case State::trailer: return read_trailer();
      case State::padding: return skip_padding();
      case State::done: return false;
    }
    return false;
  }

  size_t bits_left() const { return (in_size_ << 3) - std::min<size_t>(at_, in_size_ << 3); }

  bool has_bytes(size_t size) {
    if (bits_left() >= size << 3) return true;
    if (has_ended_) throw Damaged("the gzip stream ends too early");
    return false;
  }

  uint32_t take(int bits) {
    uint64_t word;
    if ((at_ >> 3) + 8 > in_.size()) throw Damaged("the gzip stream ends too early");
    std::memcpy(&word, in_.data() + (at_ >> 3), 8);
    const auto value = static_cast<uint32_t>((word >> (at_ & 7)) & ((uint64_t{1} << bits) - 1));
    at_ += bits;
    if (at_ > in_size_ << 3) throw Damaged("the gzip stream ends too early");
    return value;
  }

  bool read_header() {
    const uint8_t* in = in_.data() + (at_ >> 3);
    const size_t size = bits_left() >> 3;
    if (size < 10) return has_bytes(10);
    if (in[0] != 0x1f || in[1] != 0x8b) throw Damaged("not gzip");
    if (in[2] != 8 || (in[3] & 0xe0)) throw Damaged("an unknown kind of gzip");
    const int flags = in[3];
    size_t length = 10;
    if (flags & 4) {
      if (size < length + 2) return has_bytes(length + 2);
      length += 2 + (in[length] | in[length + 1] << 8);
    }
    for (const int has_text : {flags & 8, flags & 16}) {
      if (!has_text) continue;
      while (length < size && in[length]) ++length;
      if (length > LONGEST_HEADER) throw Damaged("the gzip header has no end");
      ++length;
    }
    if (flags & 2) length += 2;
    if (size < length) return has_bytes(length);
    at_ += length << 3;
    crc_ = 0, checked_ = end_, num_zeros_ = 0;
    member_begin_ = offset_;
    is_whole_member_ = true;
    state_ = State::block;
    return true;
  }

  bool begin_block() {
    if (!has_ended_ && bits_left() < LONGEST_BLOCK_HEADER << 3) return false;
    if (offset_ >= next_mark_) leave_mark();
    is_last_ = take(1);
    switch (take(2)) {
      case 0: return begin_stored();
      case 1: return begin_fixed();
      case 2: return begin_dynamic();
      default: throw Damaged("an unknown kind of block");
    }
  }

  void leave_mark() {
    const size_t size = std::min(end_, WINDOW);
    marks_.push_back({offset_, (base_ << 3) + at_, std::string(reinterpret_cast<const char*>(out_.data()) + end_ - size, size)});
    next_mark_ = offset_ + spacing_;
  }

  bool begin_stored() {
    at_ = (at_ + 7) & ~uint64_t{7};
    const uint32_t size = take(16), inverse = take(16);
    if ((size ^ inverse) != 0xffff) throw Damaged("a stored block has a wrong length");
    stored_left_ = size;
    state_ = State::stored;
    return true;
  }

  bool begin_fixed() {
    std::array<uint8_t, 288> lengths;
    for (size_t s = 0; s < lengths.size(); ++s) lengths[s] = s < 144 ? 8 : s < 256 ? 9 : s < 280 ? 7 : 8;
    std::array<uint8_t, 32> distances;
    distances.fill(5);
    literals_.build(lengths.data(), lengths.size());
    distances_.build(distances.data(), distances.size());
    state_ = State::codes;
    return true;
  }

  bool begin_dynamic() {
    static constexpr std::array<uint8_t, 19> ORDER{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    const uint32_t num_literals = take(5) + 257, num_distances = take(5) + 1, num_lengths = take(4) + 4;
    std::array<uint8_t, 19> of_lengths{};
    for (uint32_t i = 0; i < num_lengths; ++i) of_lengths[ORDER[i]] = static_cast<uint8_t>(take(3));
    if (num_literals > 286 || num_distances > 30 || !literals_.build(of_lengths.data(), of_lengths.size())) {
      throw Damaged("a block has wrong codes");
    }
    std::array<uint8_t, 320> lengths{};
    for (uint32_t i = 0; i < num_literals + num_distances;) {
      i += read_lengths(lengths, i, num_literals + num_distances);
    }
    if (!lengths[256] || !literals_.build(lengths.data(), num_literals) ||
        !distances_.build(lengths.data() + num_literals, num_distances)) {
      throw Damaged("a block has wrong codes");
    }
    state_ = State::codes;
    return true;
  }

  // One length, or a run of them. How many there were.
  uint32_t read_lengths(std::array<uint8_t, 320>& lengths, uint32_t i, uint32_t end) {
    const Codes::Entry entry = literals_.find(peek());
    if (!entry.length) throw Damaged("a block has wrong codes");
    take(entry.length);
    if (entry.value < 16) {
      lengths[i] = static_cast<uint8_t>(entry.value);
      return 1;
    }
    if (entry.value == 16 && i == 0) throw Damaged("a block has wrong codes");
    const uint8_t value = entry.value == 16 ? lengths[i - 1] : 0;
    const uint32_t run = entry.value == 16 ? 3 + take(2) : entry.value == 17 ? 3 + take(3) : 11 + take(7);
    if (i + run > end) throw Damaged("a block has wrong codes");
    std::fill_n(lengths.begin() + i, run, value);
    return run;
  }

  uint64_t peek() const {
    uint64_t word = 0;
    std::memcpy(&word, in_.data() + (at_ >> 3), 8);  // take() has checked that the last bits were there; padding follows
    return word >> (at_ & 7);
  }

  bool copy_stored() {
    const size_t size = std::min({size_t{stored_left_}, bits_left() >> 3, WINDOW + CHUNK - end_});
    std::memcpy(out_.data() + end_, in_.data() + (at_ >> 3), size);
    end_ += size, offset_ += size, at_ += size << 3, stored_left_ -= static_cast<uint32_t>(size);
    if (stored_left_ == 0) end_block();
    else if (size == 0) return has_bytes(1);
    return true;
  }

  void end_block() { state_ = is_last_ ? State::trailer : State::block; }

  static constexpr std::array<uint16_t, 29> LENGTH_BASE{3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                                        31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
  static constexpr std::array<uint8_t, 29> LENGTH_BITS{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
  static constexpr std::array<uint16_t, 30> DISTANCE_BASE{1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
                                                          193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
  static constexpr std::array<uint8_t, 30> DISTANCE_BITS{0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};

  // Symbols until the block ends, the room is full, or a symbol might not be whole in what was fed.
  bool decode() {
    const uint8_t* const in = in_.data();
    const size_t in_end = in_size_;
    size_t next = at_ >> 3;  // the byte that follows those in `bits`
    uint64_t bits = 0;
    int count = 0;  // of valid bits
    const auto refill = [&] {
      uint64_t word;
      std::memcpy(&word, in + next, 8);
      bits |= word << count;
      next += static_cast<size_t>(63 - count) >> 3;
      count |= 56;
    };
    const auto use = [&](int number) { bits >>= number, count -= number; };
    const auto position = [&] { return (uint64_t{next} << 3) - static_cast<uint64_t>(count); };
    refill();
    use(static_cast<int>(at_ & 7));
    uint8_t* out = out_.data() + end_;
    uint8_t* const out_stop = out_.data() + WINDOW + CHUNK;
    bool is_over = false;
    // A refill reads 8 bytes and a symbol uses up to 6: between them and the padding nothing beyond the buffer is read.
    while (out < out_stop && (has_ended_ ? next <= in_end + 8 : next + 16 <= in_end)) {
      refill();
      Codes::Entry entry = literals_.find(bits);
      if (entry.value < 256 && entry.length) {
        use(entry.length);
        *out++ = static_cast<uint8_t>(entry.value);
        entry = literals_.find(bits);
        if (entry.value < 256 && entry.length) {
          use(entry.length);
          *out++ = static_cast<uint8_t>(entry.value);
          continue;
        }
        refill();
        if (next > in_end + 8) break;
      }
      if (!entry.length || entry.value > 285) throw Damaged("a code that stands for nothing");
      use(entry.length);
      if (entry.value == 256) {
        is_over = true;
        break;
      }
      const size_t l = entry.value - 257u;
      const size_t length = LENGTH_BASE[l] + (bits & ((1u << LENGTH_BITS[l]) - 1));
      use(LENGTH_BITS[l]);
      const Codes::Entry far = distances_.find(bits);
      if (!far.length || far.value > 29) throw Damaged("a code that stands for nothing");
      use(far.length);
      const size_t distance = DISTANCE_BASE[far.value] + (bits & ((1u << DISTANCE_BITS[far.value]) - 1));
      use(DISTANCE_BITS[far.value]);
      if (distance > static_cast<size_t>(out - out_.data())) throw Damaged("a match before the beginning");
      copy_match(out, distance, length);
      out += length;
    }
    at_ = position();
    if (at_ > uint64_t{in_end} << 3) throw Damaged("the gzip stream ends too early");
    const size_t size = static_cast<size_t>(out - (out_.data() + end_));
    end_ += size, offset_ += size;
    if (is_over) end_block();
    else if (size == 0) return has_bytes(in_size_ + 1);
    return true;
  }

  // May write up to 15 bytes more than the match; the slack behind the room takes them.
  static void copy_match(uint8_t* out, size_t distance, size_t length) {
    const uint8_t* from = out - distance;
    if (distance >= 16) {
      for (size_t done = 0; done < length; done += 16) std::memcpy(out + done, from + done, 16);
    } else if (distance == 1) {
      std::memset(out, *from, length);
    } else {
      for (size_t i = 0; i < length; ++i) out[i] = from[i];
    }
  }

  bool read_trailer() {
    at_ = (at_ + 7) & ~uint64_t{7};
    if (!has_bytes(8)) return false;
    checksum();
    const uint32_t low = take(16), high = take(16), size_low = take(16), size_high = take(16);
    if (is_whole_member_ && ((low | high << 16) != crc_ || (size_low | size_high << 16) != static_cast<uint32_t>(offset_ - member_begin_))) {
      throw Damaged("the text does not have the checksum of the gzip file");
    }
    state_ = State::padding;
    return true;
  }

  // Another member may follow at once, or zeros up to the end, such as tapes have.
  bool skip_padding() {
    const size_t size = bits_left() >> 3;
    if (size == 0) {
      if (!has_ended_) return false;
      state_ = State::done;
      return true;
    }
    if (in_[at_ >> 3] != 0) {
      if (num_zeros_) throw Damaged("something follows the gzip stream");
      state_ = State::header;
      return true;
    }
    num_zeros_ += 1;
    at_ += 8;
    return true;
  }

  // Takes what was decompressed since the last call into the checksum.
  void checksum() {
    static const CrcTables TABLES = crc_tables();
    uint32_t crc = ~crc_;
    const uint8_t* byte = out_.data() + checked_;
    size_t left = end_ - checked_;
    for (; left >= 8; left -= 8, byte += 8) {
      uint64_t word;
      std::memcpy(&word, byte, 8);
      word ^= crc;
      crc = 0;
      for (int i = 0; i < 8; ++i) crc ^= TABLES[7 - i][(word >> (8 * i)) & 0xff];
    }
    for (; left; --left) crc = (crc >> 8) ^ TABLES[0][(crc ^ *byte++) & 0xff];
    crc_ = ~crc;
    checked_ = end_;
  }

  using CrcTables = std::array<std::array<uint32_t, 256>, 8>;
  static CrcTables crc_tables() {
    CrcTables tables;
    for (uint32_t n = 0; n < 256; ++n) {
      uint32_t crc = n;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1)));
      tables[0][n] = crc;
    }
    for (size_t n = 0; n < 256; ++n) {
      for (size_t t = 1; t < 8; ++t) tables[t][n] = (tables[t - 1][n] >> 8) ^ tables[0][tables[t - 1][n] & 0xff];
    }
    return tables;
  }

  State state_ = State::header;
  std::vector<uint8_t> in_, out_;            // of the file, with padding; of the text, with what matches reach back to
  size_t in_size_ = 0;
  uint64_t base_ = 0, at_ = 0;               // the byte of the file that `in_` begins with; the next bit in `in_`
  bool has_ended_ = false;
  size_t begin_ = 0, end_ = 0, checked_ = 0; // of the text: what is to be read, and what has its checksum
  uint64_t offset_ = 0, member_begin_ = 0;   // of the text, at `end_`
  Codes literals_, distances_;
  bool is_last_ = false, is_whole_member_ = true;
  uint32_t stored_left_ = 0, crc_ = 0, num_zeros_ = 0;
  uint64_t spacing_ = 0, next_mark_ = ~uint64_t{0};
  std::vector<Mark> marks_;
};

}  // namespace gzip
