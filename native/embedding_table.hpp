// A dynamic embedding table: 64-bit key -> one record with everything of that key.
//
// Records live in chunks that never move, so a slot number names a record until the record is evicted. The index is
// open addressing over 8-byte entries in the order of the key's hash: its high half as a tag, and the slot. It grows and
// shrinks without reading a record. A table with num_rows has no index: the slot is the key, or the key divided by the
// number of owners when the table is one of several that share the keys.
//
// With a Disk, chunks lie in its file, and every call announces the records that it is about to use.
//
// One mutex per table; public calls take it themselves. Inside a call, loops over rows may be shared among OpenMP
// threads, because each unique key owns its record.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "embedding_disk.hpp"
#include "embedding_memory.hpp"
#include "embedding_optimizer.hpp"

namespace embedding {

using Slot = uint32_t;
constexpr Slot ABSENT = 0xFFFFFFFFu;       // the key has no record: it reads its initial row, or the default row
constexpr Slot FIRST_SHARED = 0xF0000000u;  // slots from here on are rows shared by keys not yet admitted
constexpr size_t CHUNK_RECORDS = 4096;

struct Options {
  std::string name;
  size_t dim = 0;
  int64_t num_rows = 0;  // 0: any key
  float init_scale = 0.0f;
  uint64_t seed = 0;
  OptimizerOptions optimizer;
  uint32_t admit_after = 1;
  size_t bloom_counters = 0;  // 0: exact counters
  size_t shared_rows = 0;
  int64_t num_owners = 1;  // with num_rows: this table holds the keys of one remainder, side by side
};

struct __attribute__((packed, aligned(4))) Header {
  int64_t key;
  uint32_t count;
  uint32_t step;   // last seen
  uint32_t epoch;  // of the last change; 0: no record here
};

enum class Mode { none, sum, mean };

// The keys of one feature, how they form bags, and the rows that are written (pool) or read (update).
struct Segment {
  size_t table = 0;
  const int64_t* keys = nullptr;
  const uint32_t* counts = nullptr;  // sightings that each key stands for; null: one
  size_t num_keys = 0;
  const int64_t* offsets = nullptr;  // null: every key is a bag
  size_t num_rows = 0;
  const float* weights = nullptr;
  Mode mode = Mode::none;
  float* data = nullptr;  // null: nothing to pool
  size_t stride = 0;
};

// What a batch means to a table. Unique keys are in the order of their first occurrence.
struct Lookup {
  std::vector<int64_t> keys;
  std::vector<uint32_t> counts;
  std::vector<uint32_t> inverse;  // occurrence -> unique key
  std::vector<Slot> slots;
  bool train = false;
  uint32_t epoch = 0;
  uint64_t generation = 0;
};

struct Piece {
  std::vector<int64_t> keys;
  std::vector<float> rows, states;
  std::vector<uint32_t> counts, steps;
};

// Keys not yet admitted and what they share; small next to the records, so a snapshot copies it whole.
struct Waiting {
  std::vector<int64_t> keys;
  std::vector<uint32_t> counts, steps;
  std::vector<uint16_t> bloom;
  std::vector<float> shared_rows, shared_states;
};

struct Statistics {
  size_t keys, record_bytes, resident_bytes, disk_bytes, index_bytes, admission_bytes;
  uint64_t admitted, evicted, hits, misses;
  size_t waiting;
};

// Counts of keys that have no record yet, 16 bytes each.
class WaitingKeys {
 public:
  uint32_t add(int64_t key, uint64_t hash, uint32_t count, uint32_t step);
  void erase(int64_t key, uint64_t hash);
  void erase_older_than(int64_t step);
  void clear() { entries_.clear(); used_ = 0; }
  size_t size() const { return used_; }
  size_t num_bytes() const { return entries_.capacity() * sizeof(Entry); }
  void copy_to(Waiting& waiting) const;

 private:
  struct Entry { int64_t key; uint32_t count, step; };
  size_t find(int64_t key, uint64_t hash) const;
  void rebuild(size_t size);
  std::vector<Entry> entries_;
  size_t used_ = 0;
};

class Table {
 public:
  // Without a disk, all records stay in memory.
  explicit Table(Options options, std::shared_ptr<Disk> disk = nullptr);
  ~Table();

  const Options options;
  const size_t num_states;

  // Throws out_of_range before anything has changed.
  void check_keys(const int64_t* keys, size_t size) const;
  Lookup lookup(const std::vector<Segment>& segments, bool train, uint32_t step, int threads);
  void pool(const Lookup& lookup, const std::vector<Segment>& segments, int threads);
  // The gradient of each unique key, added up; throws when one is not finite.
  std::vector<float> sum_gradients(const Lookup& lookup, const std::vector<Segment>& segments, int threads) const;
  void update(const Lookup& lookup, std::vector<float>& sums, float learning_rate, int64_t step, int threads);

  size_t evict_older_than(int64_t step);
  size_t evict_smaller_than(double norm);
  size_t evict_to(size_t capacity);
  Piece least_frequent(size_t size);
  size_t remove(const int64_t* keys, size_t size);
  void load(const int64_t* keys, const float* rows, const float* states, const uint32_t* counts, const uint32_t* steps,
            size_t size);
  void load_waiting(const Waiting& waiting);
  void mark_saved();
  Statistics statistics();

  uint64_t begin_snapshot(bool delta, std::vector<int64_t>& removed, Waiting& waiting);
  bool next_piece(uint64_t snapshot, Piece& piece);
  void abandon_snapshot(uint64_t snapshot);

 private:
  struct Rank { uint32_t count, step; int64_t key; Slot slot; };
  struct Chunk { char* records = nullptr; uint32_t epoch = 0; };

  // A snapshot under way. Records are saved here before they first change after its moment.
  struct Moment {
    uint64_t id;
    uint32_t epoch, since;
    size_t next_chunk = 0;
    std::vector<std::vector<char>> saved;  // per chunk
    uint32_t base_before;
    std::vector<int64_t> tombstones;
  };

  char* record(Slot slot) const {
    if (slot >= FIRST_SHARED) return shared_.get() + (slot - FIRST_SHARED) * stride_;
    return chunks_[slot / CHUNK_RECORDS].records + (slot % CHUNK_RECORDS) * stride_;
  }
  size_t home(uint64_t hash) const { return hash >> index_shift_; }
  static Header& header(char* record) { return *reinterpret_cast<Header*>(record); }
  static float* row(char* record) { return reinterpret_cast<float*>(record + sizeof(Header)); }
  float* state(char* record) const { return row(record) + options.dim; }
  bool bounded() const { return options.num_rows > 0; }
  Slot bounded_slot(int64_t key) const {
    return static_cast<Slot>(options.num_owners == 1 ? key : key / options.num_owners);
  }
  size_t num_slots() const {
    return bounded() ? static_cast<size_t>((options.num_rows + options.num_owners - 1) / options.num_owners) : next_slot_;
  }
  bool admits_all() const { return options.admit_after <= 1; }

  Slot find(int64_t key, uint64_t hash) const;
  Slot likely_slot(int64_t key, uint64_t hash) const;
  void prefetch_index(uint64_t hash) const;
  void prefetch_record(int64_t key, uint64_t hash) const;
  void fetch(const Slot* slots, size_t size) const;
  void fetch_keys(const int64_t* keys, const uint64_t* hashes, size_t size) const;
  Slot insert(int64_t key, uint64_t hash);
  void ensure_chunk(size_t chunk);
  char* new_chunk();
  void place(uint64_t entry);
  void grow_index();
  void erase_from_index(Slot slot);
  void touch(Slot slot);
  void vacate(Slot slot);
  template <class Doomed> size_t evict_if(Doomed doomed);
  template <class Visit> void scan_chunk(size_t chunk, Visit visit) const;
  template <class Visit> void for_each(Visit visit) const;
  std::vector<Rank> ranked(size_t cut) const;
  template <class Visit> void for_portions(const int64_t* keys, size_t size, Visit visit);

  void initial_row(int64_t key, uint64_t seed, float* out) const;
  Slot shared_slot(uint64_t hash) const;
  uint32_t count_waiting(int64_t key, uint64_t hash, uint32_t count, uint32_t step);
  Slot resolve(int64_t key, uint64_t hash, uint32_t count, bool train, uint32_t step);
  Slot admit(int64_t key, uint64_t hash, uint32_t count, uint32_t step);
  const Slot* current_slots(const Lookup& lookup, std::vector<Slot>& scratch) const;
  void append(Piece& piece, char* record) const;
  template <class Whose> void check_finite(const float* values, size_t rows, size_t columns, Whose whose) const;

  const size_t stride_;
  const std::shared_ptr<Disk> disk_;
  std::mutex mutex_;
  std::vector<Chunk> chunks_;
  std::vector<Memory> arenas_;  // what the chunks lie in
  size_t num_chunks_ = 0, arena_chunks_ = 0, arena_left_ = 0;
  using Index = std::vector<uint64_t, HugeAllocator<uint64_t>>;
  Index index_;
  int index_shift_ = 0;  // 64 - log2 of its size
  std::vector<Slot> free_;
  size_t next_slot_ = 0, used_ = 0;
  Memory shared_;
  WaitingKeys waiting_;
  std::vector<uint16_t> bloom_;
  uint32_t epoch_ = 1, base_ = 0;
  uint64_t generation_ = 0, num_snapshots_ = 0;
  std::vector<int64_t> tombstones_;
  std::unique_ptr<Moment> moment_;
  uint64_t admitted_ = 0, evicted_ = 0, hits_ = 0, misses_ = 0;
};

}  // namespace embedding
