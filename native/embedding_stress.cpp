// Threads that train, read, evict, save, restore and share a disk at once: a program for the sanitizers. Build it with
//   cmake -S native -B build/tsan -DRECMILL_SANITIZE=thread      (or address,undefined)
//   cmake --build build/tsan --target embedding_stress && build/tsan/embedding_stress FOLDER
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "embedding_parallel.hpp"
#include "embedding_table.hpp"

using namespace embedding;

namespace {

constexpr size_t DIM = 16, BATCH = 1500;
constexpr int64_t NUM_KEYS = 30000;
constexpr int TURNS = 20, THREADS = 3;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

struct Batch {
  std::vector<int64_t> keys, offsets;
  std::vector<float> weights, rows;

  explicit Batch(std::mt19937_64& random) : rows(BATCH * DIM) {
    offsets.push_back(0);
    for (size_t row = 0; row < BATCH; ++row) {
      for (size_t i = random() % 4; i > 0; --i) keys.push_back(static_cast<int64_t>(random() % NUM_KEYS));
      offsets.push_back(static_cast<int64_t>(keys.size()));
    }
    weights.assign(keys.size(), 0.5f);
  }

  Segment segment() {
    Segment given;
    given.keys = keys.data();
    given.num_keys = keys.size();
    given.offsets = offsets.data();
    given.num_rows = BATCH;
    given.weights = weights.data();
    given.mode = Mode::mean;
    given.data = rows.data();
    given.stride = DIM;
    return given;
  }
};

void train(std::vector<std::shared_ptr<Table>>& tables, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (uint32_t step = 0; step < TURNS; ++step) {
    std::vector<Batch> batches;
    std::vector<Lookup> lookups(tables.size());
    std::vector<std::vector<float>> sums(tables.size());
    for (size_t i = 0; i < tables.size(); ++i) batches.emplace_back(random);
    for_items(tables.size(), THREADS, [&](size_t i, int threads) {
      lookups[i] = tables[i]->lookup({batches[i].segment()}, true, step, threads);
    });
    for (Batch& batch : batches) std::fill(batch.rows.begin(), batch.rows.end(), 0.01f);
    for (size_t i = 0; i < tables.size(); ++i) {
      sums[i] = tables[i]->sum_gradients(lookups[i], {batches[i].segment()}, THREADS);
      tables[i]->update(lookups[i], sums[i], 0.1f, step, THREADS);
    }
  }
}

void evaluate(Table& table) {
  std::mt19937_64 random(99);
  for (int turn = 0; turn < TURNS; ++turn) {
    Batch batch(random);
    const Lookup found = table.lookup({batch.segment()}, false, 0, THREADS);
    table.pool(found, {batch.segment()}, THREADS);
    require(table.statistics().keys <= static_cast<size_t>(NUM_KEYS), "no more keys than there are");
  }
}

void evict(Table& table) {
  for (int turn = 0; turn < TURNS; ++turn) {
    const int64_t some[] = {turn, turn + 1, turn + 2};
    table.remove(some, 3);
    table.evict_older_than(turn - 10);
    table.evict_smaller_than(1e-6);
    table.evict_to(NUM_KEYS / 2);
  }
}

// Saves the table again and again, and restores another one from it. A full snapshot is for an empty table, so only the first is one.
void save(Table& table, Table& restored, bool is_empty) {
  for (int turn = 0; turn < TURNS; ++turn) {
    std::vector<int64_t> removed;
    Waiting waiting;
    const uint64_t snapshot = table.begin_snapshot(!is_empty || turn > 0, removed, waiting);
    restored.remove(removed.data(), removed.size());
    for (Piece piece; table.next_piece(snapshot, piece); piece = Piece())
      restored.load(piece.keys.data(), piece.rows.data(), piece.states.data(), piece.counts.data(), piece.steps.data(), piece.keys.size());
    restored.load_waiting(waiting);
  }
}

void stress(const std::shared_ptr<Disk>& disk, int64_t num_rows, Optimizer optimizer, size_t bloom_counters) {
  Options options;
  options.name = "stress";
  options.dim = DIM;
  options.num_rows = num_rows;
  options.init_scale = 0.01f;
  options.optimizer.kind = optimizer;
  options.admit_after = 2;
  options.shared_rows = 7;
  options.bloom_counters = bloom_counters;
  std::vector<std::shared_ptr<Table>> tables;
  for (int i = 0; i < THREADS + 1; ++i) tables.push_back(std::make_shared<Table>(options, disk));
  Table restored(options, disk);
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 2; ++seed) threads.emplace_back([&, seed] { train(tables, seed); });
  threads.emplace_back([&] { evaluate(*tables[0]); });
  threads.emplace_back([&] { evict(*tables[0]); });
  threads.emplace_back([&] { save(*tables[0], restored, true); });
  for (std::thread& thread : threads) thread.join();
  save(*tables[0], restored, false);
  require(restored.statistics().keys == tables[0]->statistics().keys, "the restored table holds the live one's keys");
}

}  // namespace

int main(int, char** arguments) {
  const std::string folder = arguments[1] ? arguments[1] : ".";
  for (const int64_t num_rows : {int64_t{0}, NUM_KEYS}) {
    stress(nullptr, num_rows, Optimizer::rowwise_adagrad, 0);
    stress(std::make_shared<Disk>(folder, size_t{1} << 20), num_rows, Optimizer::adam, 4096);
    stress(std::make_shared<Disk>(folder, size_t{1} << 23), num_rows, Optimizer::ftrl, 0);
  }
  std::puts("all held");
}
