// See embedding_table.hpp for the layout and embedding_optimizer.hpp for the formulas.
#include "embedding_table.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "embedding_batch.hpp"
#include "embedding_parallel.hpp"
#include "hashing.hpp"

namespace embedding {
namespace {

constexpr uint64_t EMPTY = ~0ull;
constexpr size_t FIRST_ENTRIES = 64, SMALL_CHUNKS = 2, ARENA_CHUNKS = 12;
constexpr size_t MAX_ENTRIES = size_t{1} << 32;  // beyond it, a tag would not tell an entry's home
constexpr int FIRST_SHIFT = 64 - 6;
constexpr uint64_t BLOOM_HASHES = 4;
constexpr float MAX_SQUARED_NORM = 1e30f;  // beyond it, squares in the optimizer's state would overflow
constexpr uint64_t SHARED_SEED = 0x5EEDull;

bool too_full(size_t used, size_t entries) { return used * 10 >= entries * 7; }
uint32_t add_saturating(uint32_t left, uint32_t right) {
  return static_cast<uint32_t>(std::min<uint64_t>(uint64_t{left} + right, std::numeric_limits<uint32_t>::max()));
}
uint64_t entry_of(uint64_t hash, Slot slot) { return (hash & 0xFFFFFFFF00000000ull) | slot; }
size_t round_up(size_t bytes) { return (bytes + 7) / 8 * 8; }

}  // namespace

// --- keys not yet admitted -------------------------------------------------------------------------------------------

size_t WaitingKeys::find(int64_t key, uint64_t hash) const {
  size_t at = hash & (entries_.size() - 1);
  while (entries_[at].count && entries_[at].key != key) at = (at + 1) & (entries_.size() - 1);
  return at;
}

uint32_t WaitingKeys::add(int64_t key, uint64_t hash, uint32_t count, uint32_t step) {
  if (entries_.empty() || too_full(used_ + 1, entries_.size())) rebuild(std::max(FIRST_ENTRIES, entries_.size() * 2));
  Entry& entry = entries_[find(key, hash)];
  if (!entry.count) { entry.key = key; ++used_; }
  entry.count = add_saturating(entry.count, count);
  entry.step = std::max(entry.step, step);
  return entry.count;
}

void WaitingKeys::erase(int64_t key, uint64_t hash) {
  if (entries_.empty()) return;
  const size_t mask = entries_.size() - 1;
  size_t hole = find(key, hash);
  if (!entries_[hole].count) return;
  for (size_t next = (hole + 1) & mask; entries_[next].count; next = (next + 1) & mask) {
    const size_t home = hash_of(entries_[next].key) & mask;
    if (((next - home) & mask) < ((next - hole) & mask)) continue;
    entries_[hole] = entries_[next];
    hole = next;
  }
  entries_[hole] = Entry{0, 0, 0};
  --used_;
}

void WaitingKeys::erase_older_than(int64_t step) {
  for (Entry& entry : entries_) {
    if (entry.count && entry.step < step) { entry.count = 0; --used_; }
  }
  if (!entries_.empty()) rebuild(entries_.size());
}

void WaitingKeys::rebuild(size_t size) {
  std::vector<Entry> old(size, Entry{0, 0, 0});
  old.swap(entries_);
  for (const Entry& entry : old) {
    if (entry.count) entries_[find(entry.key, hash_of(entry.key))] = entry;
  }
}

void WaitingKeys::copy_to(Waiting& waiting) const {
  for (const Entry& entry : entries_) {
    if (!entry.count) continue;
    waiting.keys.push_back(entry.key);
    waiting.counts.push_back(entry.count);
    waiting.steps.push_back(entry.step);
  }
}

// --- records ---------------------------------------------------------------------------------------------------------

Table::Table(Options given, std::shared_ptr<Disk> disk)
    : options(std::move(given)),
      num_states(state_size(options.optimizer.kind, options.dim)),
      stride_(round_up(sizeof(Header) + (options.dim + num_states) * sizeof(float))),
      disk_(std::move(disk)),
      index_shift_(FIRST_SHIFT),
      bloom_(options.bloom_counters, 0) {
  if (options.dim == 0) throw std::invalid_argument("Table \"" + options.name + "\": dim must be positive, got 0");
  if (options.num_rows < 0 || options.num_rows > static_cast<int64_t>(FIRST_SHARED))
    throw std::invalid_argument("Table \"" + options.name + "\": num_rows must be within 1..4026531840, got " +
                                std::to_string(options.num_rows));
  if (options.shared_rows > ABSENT - FIRST_SHARED) throw std::invalid_argument("Table \"" + options.name + "\": too many shared rows");
  if (options.num_owners < 1) throw std::invalid_argument("Table \"" + options.name + "\": num_owners must be at least 1");
  if (bounded()) chunks_.resize((num_slots() + CHUNK_RECORDS - 1) / CHUNK_RECORDS);
  else index_.assign(FIRST_ENTRIES, EMPTY);
  if (options.shared_rows == 0) return;
  shared_ = allocate(options.shared_rows * stride_);
  std::memset(shared_.get(), 0, options.shared_rows * stride_);
  for (size_t i = 0; i < options.shared_rows; ++i) {
    char* at = record(FIRST_SHARED + static_cast<Slot>(i));
    initial_row(static_cast<int64_t>(i), options.seed ^ SHARED_SEED, row(at));
    initialise_state(options.optimizer, state(at), options.dim);
  }
}

Table::~Table() {
  if (!disk_) return;
  for (const Chunk& chunk : chunks_)
    if (chunk.records) disk_->free(chunk.records, CHUNK_RECORDS * stride_);
}

// Uniform in [-scale, scale), from the seed and the key alone: splitmix64 started at the key's hash.
void Table::initial_row(int64_t key, uint64_t seed, float* out) const {
  const uint64_t start = xxh64::of_int(static_cast<uint64_t>(key), seed);
  const float scale = options.init_scale, unit = scale * 0x1p-23f;
  for (size_t i = 0; i < options.dim; ++i) {
    uint64_t x = start + (i + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    out[i] = static_cast<float>(static_cast<int32_t>(x >> 40)) * unit - scale;
  }
}

void Table::check_keys(const int64_t* keys, size_t size) const {
  if (!bounded()) return;
  for (size_t i = 0; i < size; ++i) {
    if (static_cast<uint64_t>(keys[i]) < static_cast<uint64_t>(options.num_rows)) continue;
    throw std::out_of_range("Table \"" + options.name + "\": key " + std::to_string(keys[i]) + " is outside 0.." +
                            std::to_string(options.num_rows - 1));
  }
}

Slot Table::find(int64_t key, uint64_t hash) const {
  if (bounded()) {
    const Slot slot = bounded_slot(key);
    return chunks_[slot / CHUNK_RECORDS].records && header(record(slot)).epoch ? slot : ABSENT;
  }
  const size_t mask = index_.size() - 1;
  for (size_t at = home(hash); index_[at] != EMPTY; at = (at + 1) & mask) {
    const Slot slot = static_cast<Slot>(index_[at]);
    if (entry_of(hash, slot) == index_[at] && header(record(slot)).key == key) return slot;
  }
  return ABSENT;
}

// The first entry with the right tag is nearly always the key's.
Slot Table::likely_slot(int64_t key, uint64_t hash) const {
  if (bounded()) return chunks_[bounded_slot(key) / CHUNK_RECORDS].records ? bounded_slot(key) : ABSENT;
  const size_t mask = index_.size() - 1;
  size_t at = home(hash);
  while (index_[at] != EMPTY && entry_of(hash, static_cast<Slot>(index_[at])) != index_[at]) at = (at + 1) & mask;
  return index_[at] == EMPTY ? ABSENT : static_cast<Slot>(index_[at]);
}

void Table::prefetch_index(uint64_t hash) const {
  if (!bounded()) __builtin_prefetch(&index_[home(hash)]);
}

void Table::prefetch_record(int64_t key, uint64_t hash) const {
  const Slot slot = likely_slot(key, hash);
  if (slot == ABSENT) return;
  const char* at = record(slot);
  for (size_t byte = 0; byte < stride_ && byte < 256; byte += 64) __builtin_prefetch(at + byte, 1);
}

// Announces records to the disk, if there is one.
void Table::fetch(const Slot* slots, size_t size) const {
  if (!disk_) return;
  Disk::Pages pages;
  pages.reserve(size);
  for (size_t i = 0; i < size; ++i)
    if (slots[i] < FIRST_SHARED) disk_->add_pages(record(slots[i]), stride_, pages);
  disk_->fetch(pages);
}

void Table::fetch_keys(const int64_t* keys, const uint64_t* hashes, size_t size) const {
  if (!disk_) return;
  std::vector<Slot> slots(size);
  for (size_t i = 0; i < size + AHEAD; ++i) {
    if (i < size) prefetch_index(hashes[i]);
    if (i >= AHEAD) slots[i - AHEAD] = likely_slot(keys[i - AHEAD], hashes[i - AHEAD]);
  }
  fetch(slots.data(), size);
}

void Table::ensure_chunk(size_t chunk) {
  if (chunk == chunks_.size()) chunks_.emplace_back();
  if (chunks_[chunk].records) return;
  chunks_[chunk].records = new_chunk();
}

// The first chunks stand alone, so that a small table stays small; later ones come by the dozen, in huge pages.
char* Table::new_chunk() {
  const size_t bytes = CHUNK_RECORDS * stride_;
  if (disk_) {
    char* records = disk_->allocate(bytes);
    ++num_chunks_;
    return records;
  }
  if (arena_left_ == 0) {
    const size_t chunks = num_chunks_ < SMALL_CHUNKS ? 1 : std::max(ARENA_CHUNKS, HUGE_PAGE / bytes);
    arenas_.push_back(allocate(chunks * bytes));
    arena_left_ = arena_chunks_ = chunks;
  }
  char* records = arenas_.back().get() + (arena_chunks_ - arena_left_) * bytes;
  std::memset(records, 0, bytes);  // zero: no record here
  --arena_left_;
  ++num_chunks_;
  return records;
}

void Table::place(uint64_t entry) {
  const size_t mask = index_.size() - 1;
  size_t at = home(entry);
  while (index_[at] != EMPTY) at = (at + 1) & mask;
  index_[at] = entry;
}

// Entries are in the order of their hashes, so the new index is written from front to back.
void Table::grow_index() {
  if (index_.size() == MAX_ENTRIES) throw std::length_error("Table \"" + options.name + "\" is full");
  Index old(index_.size() * 2, EMPTY);
  old.swap(index_);
  --index_shift_;
  for (const uint64_t entry : old)
    if (entry != EMPTY) place(entry);
}

// A record for a key that has none; its row and state are the caller's to fill.
Slot Table::insert(int64_t key, uint64_t hash) {
  Slot slot = bounded_slot(key);
  if (bounded()) {
    ensure_chunk(slot / CHUNK_RECORDS);
  } else {
    if (too_full(used_ + 1, index_.size())) grow_index();
    if (free_.empty()) {
      if (next_slot_ == FIRST_SHARED) throw std::length_error("Table \"" + options.name + "\" is full");
      ensure_chunk(next_slot_ / CHUNK_RECORDS);
      slot = static_cast<Slot>(next_slot_++);
    } else {
      slot = free_.back();
      free_.pop_back();
    }
    place(entry_of(hash, slot));
  }
  if (disk_) disk_->mark(record(slot), stride_);
  header(record(slot)) = Header{key, 0, 0, epoch_};
  chunks_[slot / CHUNK_RECORDS].epoch = epoch_;
  ++used_;
  return slot;
}

void Table::erase_from_index(Slot slot) {
  const size_t mask = index_.size() - 1;
  size_t hole = home(hash_of(header(record(slot)).key));
  while (static_cast<Slot>(index_[hole]) != slot) hole = (hole + 1) & mask;
  for (size_t next = (hole + 1) & mask; index_[next] != EMPTY; next = (next + 1) & mask) {
    if (((next - home(index_[next])) & mask) < ((next - hole) & mask)) continue;
    index_[hole] = index_[next];
    hole = next;
  }
  index_[hole] = EMPTY;
}

// Called before any change of a record. Its first change in an epoch saves it for a snapshot that has yet to read it.
void Table::touch(Slot slot) {
  char* at = record(slot);
  Header& head = header(at);
  if (head.epoch == epoch_) return;
  const size_t chunk = slot / CHUNK_RECORDS;
  if (moment_ && head.epoch > moment_->since && chunk >= moment_->next_chunk && chunk < moment_->saved.size()) {
    std::vector<char>& saved = moment_->saved[chunk];
    saved.insert(saved.end(), at, at + stride_);
  }
  head.epoch = epoch_;
  chunks_[chunk].epoch = epoch_;
}

void Table::vacate(Slot slot) {
  touch(slot);
  tombstones_.push_back(header(record(slot)).key);
  if (!bounded()) {
    free_.push_back(slot);
    erase_from_index(slot);
  }
  header(record(slot)).epoch = 0;
  --used_;
  ++evicted_;
  ++generation_;
}

// --- lookup ----------------------------------------------------------------------------------------------------------

Slot Table::shared_slot(uint64_t hash) const {
  return options.shared_rows ? FIRST_SHARED + static_cast<Slot>(shared_row_of(hash, options.shared_rows)) : ABSENT;
}

// How often the key has been seen, this time included: exact, or a counting Bloom filter's estimate, never too low.
uint32_t Table::count_waiting(int64_t key, uint64_t hash, uint32_t count, uint32_t step) {
  if (bloom_.empty()) return waiting_.add(key, hash, count, step);
  uint16_t* counters[BLOOM_HASHES];
  uint32_t least = std::numeric_limits<uint32_t>::max();
  for (uint64_t i = 0; i < BLOOM_HASHES; ++i) {
    counters[i] = &bloom_[slot_of(xxh64::of_int(static_cast<uint64_t>(key), i + 1), bloom_.size())];
    least = std::min<uint32_t>(least, *counters[i]);
  }
  const uint32_t total = std::min<uint32_t>(add_saturating(least, count), std::numeric_limits<uint16_t>::max());
  // Only counters below the new estimate rise: still never too low, and closer.
  for (uint16_t* counter : counters) *counter = std::max(*counter, static_cast<uint16_t>(total));
  return total;
}

Slot Table::admit(int64_t key, uint64_t hash, uint32_t count, uint32_t step) {
  const Slot slot = insert(key, hash);
  char* at = record(slot);
  header(at).count = count;
  header(at).step = step;
  const Slot shared = admits_all() ? ABSENT : shared_slot(hash);
  if (shared == ABSENT) {
    initial_row(key, options.seed, row(at));
    initialise_state(options.optimizer, state(at), options.dim);
  } else {
    std::memcpy(row(at), row(record(shared)), (options.dim + num_states) * sizeof(float));
  }
  ++admitted_;
  return slot;
}

Slot Table::resolve(int64_t key, uint64_t hash, uint32_t count, bool train, uint32_t step) {
  const Slot slot = find(key, hash);
  if (slot != ABSENT) {
    hits_ += count;
    if (!train) return slot;
    touch(slot);
    Header& head = header(record(slot));
    head.count = add_saturating(head.count, count);
    head.step = std::max(head.step, step);
    return slot;
  }
  misses_ += count;
  if (admits_all()) return train ? admit(key, hash, count, step) : ABSENT;
  if (!train) return shared_slot(hash);
  const uint32_t total = count_waiting(key, hash, count, step);
  if (total < options.admit_after) return shared_slot(hash);
  if (bloom_.empty()) waiting_.erase(key, hash);
  return admit(key, hash, total, step);
}

Lookup Table::lookup(const std::vector<Segment>& segments, bool train, uint32_t step, int threads) {
  Lookup found;
  found.train = train;
  const std::vector<uint64_t> hashes = find_duplicates(segments, found);
  const size_t size = found.keys.size();
  found.slots.resize(size);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    found.epoch = epoch_;
    found.generation = generation_;
    fetch_keys(found.keys.data(), hashes.data(), size);
    // Misses overlap: a key's entry is asked for well before its record, and that well before it is used.
    for (size_t i = 0; i < size + 2 * AHEAD; ++i) {
      if (i < size) prefetch_index(hashes[i]);
      const size_t next = i - AHEAD, now = i - 2 * AHEAD;  // wrap around at first, which is beyond size too
      if (next < size) prefetch_record(found.keys[next], hashes[next]);
      if (now < size) found.slots[now] = resolve(found.keys[now], hashes[now], found.counts[now], train, step);
    }
    if (disk_) disk_->trim();
  }
  pool(found, segments, threads);
  return found;
}

// Slots as they are now: evicted keys have none, and a key that came back has another one.
const Slot* Table::current_slots(const Lookup& lookup, std::vector<Slot>& scratch) const {
  if (lookup.generation == generation_) return lookup.slots.data();
  scratch = lookup.slots;
  std::vector<uint64_t> hashes(scratch.size());
  std::transform(lookup.keys.begin(), lookup.keys.end(), hashes.begin(), hash_of);
  fetch_keys(lookup.keys.data(), hashes.data(), hashes.size());
  for (size_t i = 0; i < scratch.size(); ++i) {
    if (scratch[i] < FIRST_SHARED) scratch[i] = find(lookup.keys[i], hashes[i]);
  }
  return scratch.data();
}

void Table::pool(const Lookup& lookup, const std::vector<Segment>& segments, int threads) {
  if (std::none_of(segments.begin(), segments.end(), [](const Segment& s) { return s.data != nullptr; })) return;
  const size_t dim = options.dim, size = lookup.keys.size();
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Slot> scratch;
  const Slot* slots = current_slots(lookup, scratch);
  fetch(slots, size);
  const size_t num_absent = static_cast<size_t>(std::count(slots, slots + size, ABSENT));
  std::vector<float> absent(num_absent * dim, 0.0f);
  std::vector<const float*> rows(size);
  float* next = absent.data();
  for (size_t i = 0; i < size; ++i) {
    if (slots[i] != ABSENT) { rows[i] = row(record(slots[i])); continue; }
    if (admits_all()) initial_row(lookup.keys[i], options.seed, next);
    rows[i] = next;
    next += dim;
  }
  const float* const* row_of = rows.data();
  pool_segments(segments, [row_of](uint32_t unique) { return row_of[unique]; }, lookup.inverse.data(), dim, threads);
}

// --- update ----------------------------------------------------------------------------------------------------------

std::vector<float> Table::sum_gradients(const Lookup& lookup, const std::vector<Segment>& segments, int threads) const {
  if (!lookup.train) throw std::invalid_argument("Table \"" + options.name + "\": only a lookup with train=True can be updated");
  const size_t dim = options.dim;
  std::vector<float> sums(lookup.keys.size() * dim, 0.0f);
  for_ranges(lookup.keys.size(), threads, MIN_ROWS_PER_THREAD, [&](size_t begin, size_t end) {
    const uint32_t* inverse = lookup.inverse.data();
    for (const Segment& segment : segments) {
      add_gradients(segment, inverse, begin, end, sums.data(), dim);
      inverse += segment.num_keys;
    }
  });
  for (size_t i = 0; i < lookup.keys.size(); ++i) {
    if (sum_of_squares(&sums[i * dim], dim) <= MAX_SQUARED_NORM) continue;  // false for NaN too
    throw std::invalid_argument("Table \"" + options.name + "\": the gradient of key " + std::to_string(lookup.keys[i]) +
                                " is not finite or its norm is beyond 1e15; nothing was updated");
  }
  return sums;
}

void Table::update(const Lookup& lookup, std::vector<float>& sums, float learning_rate, int64_t step, int threads) {
  const size_t dim = options.dim, size = lookup.keys.size();
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Slot> scratch;
  const Slot* slots = current_slots(lookup, scratch);
  fetch(slots, size);
  if (lookup.epoch != epoch_) {  // otherwise the lookup has touched them all
    for (size_t i = 0; i < size; ++i) if (slots[i] < FIRST_SHARED) touch(slots[i]);
  }
  if (options.shared_rows) {
    // Keys on one shared row act as one key: their gradients are added up before the optimizer sees them.
    if (slots != scratch.data()) scratch.assign(slots, slots + size);
    std::unordered_map<Slot, size_t> first;
    for (size_t i = 0; i < size; ++i) {
      if (scratch[i] < FIRST_SHARED || scratch[i] == ABSENT) continue;
      const auto [at, is_new] = first.emplace(scratch[i], i);
      if (is_new) continue;
      add_row(&sums[at->second * dim], &sums[i * dim], dim);
      scratch[i] = ABSENT;
    }
    slots = scratch.data();
  }
  for_ranges(size, threads, MIN_ROWS_PER_THREAD, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + AHEAD < end && slots[i + AHEAD] != ABSENT) {
        const char* ahead = record(slots[i + AHEAD]);
        __builtin_prefetch(ahead, 1);
        __builtin_prefetch(ahead + 64, 1);
      }
      if (slots[i] == ABSENT) continue;
      char* at = record(slots[i]);
      apply(options.optimizer, row(at), state(at), &sums[i * dim], dim, learning_rate, step);
    }
  });
}

// --- eviction --------------------------------------------------------------------------------------------------------

// Visits the slots of a chunk that hold a record. The visitor may vacate them.
template <class Visit>
void Table::scan_chunk(size_t chunk, Visit visit) const {
  char* records = chunks_[chunk].records;
  if (!records) return;
  const size_t end = std::min(num_slots(), (chunk + 1) * CHUNK_RECORDS);
  if (disk_) disk_->read_ahead(records, CHUNK_RECORDS * stride_);
  for (size_t slot = chunk * CHUNK_RECORDS; slot < end; ++slot) {
    if (header(record(static_cast<Slot>(slot))).epoch) visit(static_cast<Slot>(slot));
  }
  if (disk_) disk_->let_go(records, CHUNK_RECORDS * stride_);
}

template <class Visit>
void Table::for_each(Visit visit) const {
  for (size_t chunk = 0; chunk < chunks_.size(); ++chunk) scan_chunk(chunk, visit);
}

template <class Doomed>
size_t Table::evict_if(Doomed doomed) {
  const size_t before = used_;
  for_each([&](Slot slot) { if (doomed(record(slot))) vacate(slot); });
  return before - used_;
}

size_t Table::evict_older_than(int64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.erase_older_than(step);
  return evict_if([&](char* at) { return header(at).step < step; });
}

size_t Table::evict_smaller_than(double norm) {
  std::lock_guard<std::mutex> lock(mutex_);
  return evict_if([&](char* at) {
    double squares = 0.0;
    for (size_t i = 0; i < options.dim; ++i) squares += static_cast<double>(row(at)[i]) * row(at)[i];
    return std::sqrt(squares) < norm;
  });
}

// All keys, those that capacity keeps first: the most frequent ones; ties go to the more recently seen, then to the smaller key.
std::vector<Table::Rank> Table::ranked(size_t cut) const {
  std::vector<Rank> ranks;
  ranks.reserve(used_);
  for_each([&](Slot slot) {
    const Header& head = header(record(slot));
    ranks.push_back({head.count, head.step, head.key, slot});
  });
  std::nth_element(ranks.begin(), ranks.begin() + static_cast<ptrdiff_t>(cut), ranks.end(), [](const Rank& left, const Rank& right) {
    if (left.count != right.count) return left.count > right.count;
    if (left.step != right.step) return left.step > right.step;
    return left.key < right.key;
  });
  return ranks;
}

size_t Table::evict_to(size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (used_ <= capacity) return 0;
  const std::vector<Rank> ranks = ranked(capacity);
  std::vector<bool> doomed(num_slots());
  for (size_t i = capacity; i < ranks.size(); ++i) doomed[ranks[i].slot] = true;
  for_each([&](Slot slot) { if (doomed[slot]) vacate(slot); });
  return ranks.size() - capacity;
}

// The keys that capacity would evict first, in no order.
Piece Table::least_frequent(size_t size) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t kept = used_ - std::min(size, used_);
  const std::vector<Rank> ranks = ranked(kept);
  Piece least;
  for (size_t i = kept; i < ranks.size(); ++i) {
    least.keys.push_back(ranks[i].key);
    least.counts.push_back(ranks[i].count);
    least.steps.push_back(ranks[i].step);
  }
  return least;
}

// visit(i, hash of keys[i]) for each key; the records of a portion are fetched before its first visit.
template <class Visit>
void Table::for_portions(const int64_t* keys, size_t size, Visit visit) {
  std::vector<uint64_t> hashes;
  for (size_t begin = 0; begin < size; begin += hashes.size()) {
    hashes.resize(std::min(CHUNK_RECORDS, size - begin));
    std::transform(keys + begin, keys + begin + hashes.size(), hashes.begin(), hash_of);
    fetch_keys(keys + begin, hashes.data(), hashes.size());
    for (size_t i = 0; i < hashes.size(); ++i) visit(begin + i, hashes[i]);
  }
  if (disk_) disk_->trim();
}

size_t Table::remove(const int64_t* keys, size_t size) {
  check_keys(keys, size);
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t before = used_;
  for_portions(keys, size, [&](size_t i, uint64_t hash) {
    const Slot slot = find(keys[i], hash);
    if (slot != ABSENT) vacate(slot);
  });
  return before - used_;
}

// --- loading and snapshots -------------------------------------------------------------------------------------------

// Throws when a row of a matrix is not finite; whose(row) names it.
template <class Whose>
void Table::check_finite(const float* values, size_t rows, size_t columns, Whose whose) const {
  const float* end = values + rows * columns;
  const float* bad = std::find_if_not(values, end, [](float value) { return std::isfinite(value); });
  if (bad == end) return;
  throw std::invalid_argument("Table \"" + options.name + "\": " + whose(static_cast<size_t>(bad - values) / columns) +
                              " is not finite; nothing was loaded");
}

void Table::load(const int64_t* keys, const float* rows, const float* states, const uint32_t* counts, const uint32_t* steps,
                 size_t size) {
  check_keys(keys, size);
  check_finite(rows, size, options.dim, [&](size_t i) { return "the row of key " + std::to_string(keys[i]); });
  check_finite(states, size, num_states, [&](size_t i) { return "the optimizer state of key " + std::to_string(keys[i]); });
  std::lock_guard<std::mutex> lock(mutex_);
  for_portions(keys, size, [&](size_t i, uint64_t hash) {
    Slot slot = find(keys[i], hash);
    if (slot == ABSENT) {
      slot = insert(keys[i], hash);
      if (bloom_.empty()) waiting_.erase(keys[i], hash);
    } else {
      touch(slot);
    }
    char* at = record(slot);
    header(at).count = counts[i];
    header(at).step = steps[i];
    std::memcpy(row(at), rows + i * options.dim, options.dim * sizeof(float));
    std::memcpy(state(at), states + i * num_states, num_states * sizeof(float));
  });
}

void Table::load_waiting(const Waiting& waiting) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (waiting.bloom.size() != bloom_.size() || waiting.shared_rows.size() != options.shared_rows * options.dim ||
      waiting.shared_states.size() != options.shared_rows * num_states)
    throw std::invalid_argument("Table \"" + options.name + "\": the saved admission state is of another size");
  check_keys(waiting.keys.data(), waiting.keys.size());
  const auto zero = std::find(waiting.counts.begin(), waiting.counts.end(), 0u);
  if (zero != waiting.counts.end())
    throw std::invalid_argument("Table \"" + options.name + "\": key " +
                                std::to_string(waiting.keys[static_cast<size_t>(zero - waiting.counts.begin())]) +
                                " waits with a count of 0; nothing was loaded");
  check_finite(waiting.shared_rows.data(), options.shared_rows, options.dim,
               [](size_t i) { return "shared row " + std::to_string(i); });
  check_finite(waiting.shared_states.data(), options.shared_rows, num_states,
               [](size_t i) { return "the optimizer state of shared row " + std::to_string(i); });
  waiting_.clear();
  for (size_t i = 0; i < waiting.keys.size(); ++i)
    waiting_.add(waiting.keys[i], hash_of(waiting.keys[i]), waiting.counts[i], waiting.steps[i]);
  bloom_ = waiting.bloom;
  for (size_t i = 0; i < options.shared_rows; ++i) {
    char* at = record(FIRST_SHARED + static_cast<Slot>(i));
    std::memcpy(row(at), &waiting.shared_rows[i * options.dim], options.dim * sizeof(float));
    if (num_states) std::memcpy(state(at), &waiting.shared_states[i * num_states], num_states * sizeof(float));
  }
}

// What is in the table counts as saved: the next delta holds only what changes from here on.
void Table::mark_saved() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (moment_) throw std::runtime_error("Table \"" + options.name + "\": a snapshot is being read; finish or close it first");
  base_ = epoch_++;
  tombstones_.clear();
}

Statistics Table::statistics() {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t chunk_bytes = CHUNK_RECORDS * stride_, record_bytes = num_chunks_ * chunk_bytes;
  size_t resident = disk_ ? 0 : record_bytes;
  for (const Chunk& chunk : chunks_)
    if (disk_ && chunk.records) resident += disk_->resident_bytes(chunk.records, chunk_bytes);
  return {used_,
          record_bytes,
          resident,
          disk_ ? record_bytes : 0,
          index_.capacity() * sizeof(uint64_t) + free_.capacity() * sizeof(Slot),
          waiting_.num_bytes() + bloom_.size() * sizeof(uint16_t) + options.shared_rows * stride_,
          admitted_, evicted_, hits_, misses_, waiting_.size()};
}

void Table::append(Piece& piece, char* at) const {
  const Header& head = header(at);
  piece.keys.push_back(head.key);
  piece.counts.push_back(head.count);
  piece.steps.push_back(head.step);
  piece.rows.insert(piece.rows.end(), row(at), row(at) + options.dim);
  piece.states.insert(piece.states.end(), state(at), state(at) + num_states);
}

uint64_t Table::begin_snapshot(bool delta, std::vector<int64_t>& removed, Waiting& waiting) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (moment_) throw std::runtime_error("Table \"" + options.name + "\": a snapshot is being read; finish or close it first");
  auto moment = std::make_unique<Moment>();
  moment->id = ++num_snapshots_;
  moment->epoch = epoch_;
  moment->since = delta ? base_ : 0;
  moment->saved.resize(chunks_.size());
  moment->base_before = base_;
  std::sort(tombstones_.begin(), tombstones_.end());
  tombstones_.erase(std::unique(tombstones_.begin(), tombstones_.end()), tombstones_.end());
  if (delta) removed = tombstones_;
  waiting_.copy_to(waiting);
  waiting.bloom = bloom_;
  for (size_t i = 0; i < options.shared_rows; ++i) {
    char* at = record(FIRST_SHARED + static_cast<Slot>(i));
    waiting.shared_rows.insert(waiting.shared_rows.end(), row(at), row(at) + options.dim);
    waiting.shared_states.insert(waiting.shared_states.end(), state(at), state(at) + num_states);
  }
  moment->tombstones.swap(tombstones_);
  base_ = epoch_++;
  moment_ = std::move(moment);
  return moment_->id;
}

// The next records of the snapshot's moment, a chunk or more; false when there are none left. Training goes on between chunks.
bool Table::next_piece(uint64_t snapshot, Piece& piece) {
  while (piece.keys.size() < CHUNK_RECORDS) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!moment_ || moment_->id != snapshot) break;
    const size_t chunk = moment_->next_chunk;
    if (chunk >= moment_->saved.size()) {
      moment_.reset();
      break;
    }
    std::vector<char> saved = std::move(moment_->saved[chunk]);
    for (size_t byte = 0; byte < saved.size(); byte += stride_) append(piece, saved.data() + byte);
    if (chunks_[chunk].epoch > moment_->since) {
      scan_chunk(chunk, [&](Slot slot) {
        const uint32_t epoch = header(record(slot)).epoch;
        if (epoch > moment_->since && epoch <= moment_->epoch) append(piece, record(slot));
      });
    }
    ++moment_->next_chunk;
  }
  return !piece.keys.empty();
}

// An unread rest means the snapshot was not saved: the next delta must hold its changes as well.
void Table::abandon_snapshot(uint64_t snapshot) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!moment_ || moment_->id != snapshot) return;
  base_ = moment_->base_before;
  tombstones_.insert(tombstones_.end(), moment_->tombstones.begin(), moment_->tombstones.end());
  moment_.reset();
}

}  // namespace embedding
