// Bytes between processes of one machine: a ring in shared memory for each sender and receiver.
//
// The bytes of a pair arrive in the order in which they were sent. They move while a process starts or awaits a transfer,
// not on threads of their own, which would take time from cores that compute. One thread uses an object.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <stdexcept>
#include <vector>

namespace rings {

constexpr size_t LINE = 64;
constexpr size_t CHUNK = 64 << 10;  // the receiver copies one while the sender writes the next
constexpr std::chrono::microseconds SPIN{20};

struct Ring {
  alignas(LINE) std::atomic<uint64_t> written;
  alignas(LINE) std::atomic<uint64_t> read;
};

// Rung for a process whenever bytes for it arrived or left its rings.
struct Bell {
  alignas(LINE) std::atomic<uint32_t> count;
  std::atomic<uint32_t> is_awaited, is_closed;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

struct Part {
  uint8_t* bytes;
  size_t size;
  uint64_t transfer;
};

class Rings {
 public:
  static size_t memory_size(size_t size, size_t ring_bytes) {
    return size * sizeof(Bell) + size * size * (sizeof(Ring) + ring_bytes);
  }

  // `memory` was zeros before the first process came. `ring_bytes` is a multiple of a line.
  Rings(uint8_t* memory, size_t rank, size_t size, size_t ring_bytes)
      : rank_(rank), size_(size), ring_bytes_(ring_bytes), sent_(size), received_(size) {
    bells_ = reinterpret_cast<Bell*>(memory);
    rings_ = reinterpret_cast<Ring*>(memory + size * sizeof(Bell));
    bytes_ = memory + size * sizeof(Bell) + size * size * sizeof(Ring);
  }

  // Begin to send sent[w] to process w and to receive received[w] from it; they must outlive the transfer.
  uint64_t start(const std::vector<Part>& sent, const std::vector<Part>& received) {
    const uint64_t transfer = next_++;
    size_t parts = 0;
    for (size_t w = 0; w < size_; ++w) {
      if (w == rank_) continue;
      for (auto [queue, part] : {std::pair{&sent_[w], sent[w]}, std::pair{&received_[w], received[w]}}) {
        if (!part.size) continue;
        queue->push_back({part.bytes, part.size, transfer});
        ++parts;
      }
    }
    if (parts) open_[transfer] = parts;
    move_bytes();
    return transfer;
  }

  // Whether it ended within the time.
  bool wait(uint64_t transfer, double seconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (open_.count(transfer)) {
      Bell& own = bells_[rank_];
      const uint32_t seen = own.count.load(std::memory_order_acquire);
      const bool is_broken = somebody_closed();  // read before the rings: what was sent before closing arrives
      if (move_bytes()) continue;
      if (is_broken) throw std::runtime_error("another process closed its rings");
      const auto now = std::chrono::steady_clock::now();
      if (now >= end) return false;
      await(own, seen, now, std::chrono::duration<double>(end - now).count());
    }
    return true;
  }

  void close() {
    bells_[rank_].is_closed.store(1, std::memory_order_release);
    for (size_t w = 0; w < size_; ++w) ring_bell(w);
  }

 private:
  Ring& ring(size_t from, size_t to) { return rings_[from * size_ + to]; }
  uint8_t* bytes(size_t from, size_t to) { return bytes_ + (from * size_ + to) * ring_bytes_; }

  // Of those that this process sends to or receives from.
  bool somebody_closed() {
    for (size_t w = 0; w < size_; ++w)
      if ((!sent_[w].empty() || !received_[w].empty()) && bells_[w].is_closed.load(std::memory_order_acquire)) return true;
    return false;
  }

  // Whatever fits now, in both directions; whether that was anything.
  bool move_bytes() {
    bool moved = false;
    for (size_t w = 0; w < size_; ++w) {
      while (!sent_[w].empty() && send_chunk(w)) moved = true;
      while (!received_[w].empty() && receive_chunk(w)) moved = true;
    }
    return moved;
  }

  bool send_chunk(size_t to) {
    Part& part = sent_[to].front();
    Ring& r = ring(rank_, to);
    const uint64_t written = r.written.load(std::memory_order_relaxed);
    const size_t room = ring_bytes_ - static_cast<size_t>(written - r.read.load(std::memory_order_acquire));
    const size_t size = std::min({part.size, room, CHUNK});
    if (!size) return false;
    const size_t at = written % ring_bytes_, first = std::min(size, ring_bytes_ - at);
    std::memcpy(bytes(rank_, to) + at, part.bytes, first);
    std::memcpy(bytes(rank_, to), part.bytes + first, size - first);
    r.written.store(written + size, std::memory_order_release);
    advance(sent_[to], size);
    ring_bell(to);
    return true;
  }

  bool receive_chunk(size_t from) {
    Part& part = received_[from].front();
    Ring& r = ring(from, rank_);
    const uint64_t read = r.read.load(std::memory_order_relaxed);
    const size_t size = std::min({part.size, static_cast<size_t>(r.written.load(std::memory_order_acquire) - read), CHUNK});
    if (!size) return false;
    const size_t at = read % ring_bytes_, first = std::min(size, ring_bytes_ - at);
    std::memcpy(part.bytes, bytes(from, rank_) + at, first);
    std::memcpy(part.bytes + first, bytes(from, rank_), size - first);
    r.read.store(read + size, std::memory_order_release);
    advance(received_[from], size);
    ring_bell(from);
    return true;
  }

  void advance(std::deque<Part>& queue, size_t size) {
    Part& part = queue.front();
    part.bytes += size;
    part.size -= size;
    if (part.size) return;
    const auto left = open_.find(part.transfer);
    if (!--left->second) open_.erase(left);
    queue.pop_front();
  }

  // Sequentially consistent: either the count is seen by who goes to sleep, or that it is awaited is seen here.
  void ring_bell(size_t w) {
    bells_[w].count.fetch_add(1);
    if (bells_[w].is_awaited.load()) syscall(SYS_futex, &bells_[w].count, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }

  void await(Bell& own, uint32_t seen, std::chrono::steady_clock::time_point now, double seconds) {
    for (const auto end = now + SPIN; std::chrono::steady_clock::now() < end;)
      if (own.count.load(std::memory_order_acquire) != seen) return;
    own.is_awaited.store(1);
    const timespec most{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9)};
    syscall(SYS_futex, &own.count, FUTEX_WAIT, seen, &most, nullptr, 0);
    own.is_awaited.store(0);
  }

  size_t rank_, size_, ring_bytes_;
  Bell* bells_;
  Ring* rings_;
  uint8_t* bytes_;
  std::vector<std::deque<Part>> sent_, received_;  // by process, in the order of their transfers
  std::map<uint64_t, size_t> open_;                // how many parts of a transfer are left
  uint64_t next_ = 0;
};

}  // namespace rings
