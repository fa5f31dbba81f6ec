// Random transfers between workers, each a thread here, through rings that are smaller than many of the messages: a program
// for the sanitizers. Every byte is compared, and one worker that closes its rings ends the others. Build it with
//   cmake -S native -B build/tsan -DRECMILL_SANITIZE=thread      (or address,undefined)
//   cmake --build build/tsan --target rings_stress && build/tsan/rings_stress
#include "rings.hpp"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t RING_BYTES = 4 * rings::LINE;
constexpr int TRANSFERS = 400;

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// How much one worker sends another in a transfer, and which bytes: known to both without a message.
size_t size_of(int transfer, size_t from, size_t to) {
  std::minstd_rand random(static_cast<unsigned>(1 + transfer * 64 + from * 8 + to));
  random.discard(4);
  return from == to || random() % 4 == 0 ? 0 : random() % (6 * RING_BYTES);
}

uint8_t byte_of(int transfer, size_t from, size_t to, size_t i) { return static_cast<uint8_t>(transfer * 31 + from * 7 + to * 3 + i); }

struct Transfer {
  std::vector<Bytes> sent, received;
  uint64_t number = 0;

  Transfer(rings::Rings& rings, int transfer, size_t rank, size_t size) {
    std::vector<rings::Part> from, into;
    for (size_t w = 0; w < size; ++w) {
      sent.emplace_back(size_of(transfer, rank, w)), received.emplace_back(size_of(transfer, w, rank));
      for (size_t i = 0; i < sent[w].size(); ++i) sent[w][i] = byte_of(transfer, rank, w, i);
    }
    for (size_t w = 0; w < size; ++w) {
      from.push_back({sent[w].data(), sent[w].size(), 0});
      into.push_back({received[w].data(), received[w].size(), 0});
    }
    number = rings.start(from, into);
  }

  void finish(rings::Rings& rings, int transfer, size_t rank) {
    check(rings.wait(number, 60), "a transfer did not end");
    for (size_t w = 0; w < received.size(); ++w)
      for (size_t i = 0; i < received[w].size(); ++i)
        check(received[w][i] == byte_of(transfer, w, rank, i), "a byte differs from what was sent");
  }
};

// Up to two transfers are under way, as steps and the keys of the next batch are.
void work(uint8_t* memory, size_t rank, size_t size) {
  rings::Rings rings(memory, rank, size, RING_BYTES);
  std::unique_ptr<Transfer> before;
  for (int transfer = 0; transfer < TRANSFERS; ++transfer) {
    auto next = std::make_unique<Transfer>(rings, transfer, rank, size);
    if (before) before->finish(rings, transfer - 1, rank);
    before = std::move(next);
  }
  before->finish(rings, TRANSFERS - 1, rank);
  if (rank == 0) return rings.close();
  Bytes nothing, one(1);
  std::vector<rings::Part> from(size, {nothing.data(), 0, 0}), into(size, {nothing.data(), 0, 0});
  into[0] = {one.data(), 1, 0};
  try {
    rings.wait(rings.start(from, into), 60);
    check(false, "a worker that closed was not noticed");
  } catch (const std::runtime_error&) {
  }
}

}  // namespace

int main() {
  for (const size_t size : {2, 3, 5}) {
    const size_t bytes = rings::Rings::memory_size(size, RING_BYTES);
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(rings::LINE, (bytes + rings::LINE - 1) / rings::LINE * rings::LINE), &std::free);
    std::memset(memory.get(), 0, bytes);
    std::vector<std::thread> workers;
    for (size_t rank = 0; rank < size; ++rank) workers.emplace_back(work, static_cast<uint8_t*>(memory.get()), rank, size);
    for (auto& worker : workers) worker.join();
    std::printf("%zu workers, %d transfers: as sent\n", size, TRANSFERS);
  }
}
