#include "embedding_disk.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace embedding {
namespace {

constexpr long TMPFS = 0x01021994;
constexpr size_t MAX_RUN = 1024, HYSTERESIS = 16;

int open_unlinked(const std::string& folder) {
  std::string path = folder + "/.recmill-embeddings-XXXXXX";
  const int file = mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) throw DiskError(errno, "Folder " + folder + " cannot hold embedding records: " + std::strerror(errno));
  unlink(path.c_str());  // nothing is left behind, however the process ends
  return file;
}

char* reserve(size_t bytes, int flags, int file) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, file, 0);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

}  // namespace

Disk::Disk(const std::string& folder, size_t memory_bytes) : folder_(folder), bound_(memory_bytes / PAGE) {
  struct statfs found;
  if (statfs(folder.c_str(), &found) != 0)
    throw DiskError(errno, "Folder " + folder + " cannot hold embedding records: " + std::strerror(errno));
  if (found.f_type == TMPFS)
    throw DiskError(EINVAL, "Folder " + folder + " lies in memory (tmpfs), so it cannot spare any; name a folder on a disk");
  file_ = open_unlinked(folder);
  // Address space for a full disk, so that records never move; it costs nothing until it is used.
  reserved_ = static_cast<size_t>(found.f_blocks) * static_cast<size_t>(found.f_bsize) / PAGE * PAGE;
  base_ = reserve(reserved_, MAP_SHARED, file_);
  states_ = reinterpret_cast<std::atomic<uint8_t>*>(reserve(reserved_ / PAGE, MAP_PRIVATE | MAP_ANONYMOUS, -1));
  if (!base_ || !states_) {
    const int code = errno;
    close_all();
    throw DiskError(code, "Folder " + folder + " cannot be mapped: " + std::strerror(code));
  }
  madvise(base_, reserved_, MADV_RANDOM);
}

void Disk::close_all() {
  if (base_) munmap(base_, reserved_);
  if (states_) munmap(static_cast<void*>(states_), reserved_ / PAGE);
  if (file_ >= 0) close(file_);
}

char* Disk::allocate(size_t bytes) {
  const size_t rounded = (bytes + PAGE - 1) / PAGE * PAGE;
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t size = num_pages_ * PAGE;
  const int code = size + rounded > reserved_ ? ENOSPC : posix_fallocate(file_, static_cast<off_t>(size), static_cast<off_t>(rounded));
  if (code != 0)
    throw DiskError(code, "Folder " + folder_ + " has no room for " + std::to_string(rounded) + " more bytes of embedding records (" +
                              std::to_string(size) + " are there): " + std::strerror(code));
  num_pages_ += rounded / PAGE;
  return base_ + size;
}

// The place on disk is given back; the addresses are not used again.
void Disk::free(char* at, size_t bytes) {
  const size_t last = page_of(at + bytes - 1);
  for (size_t page = page_of(at); page <= last; ++page)
    if (states_[page].exchange(0, std::memory_order_relaxed) & RESIDENT) --resident_;
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at - base_, static_cast<off_t>(bytes));
}

// True when the page was not in memory.
bool Disk::mark_page(size_t page) {
  if (states_[page].load(std::memory_order_relaxed) == (RESIDENT | RECENT)) return false;
  if (states_[page].fetch_or(RESIDENT | RECENT, std::memory_order_relaxed) & RESIDENT) return false;
  resident_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void Disk::fetch(Pages& pages) {
  pages.erase(std::remove_if(pages.begin(), pages.end(), [this](size_t page) { return !mark_page(page); }), pages.end());
  trim();
  std::sort(pages.begin(), pages.end());
  for (size_t begin = 0, end; begin < pages.size(); begin = end) {
    for (end = begin + 1; end < pages.size() && pages[end] == pages[end - 1] + 1;) ++end;
    read_ahead(base_ + pages[begin] * PAGE, (end - begin) * PAGE);
  }
}

void Disk::mark(const char* at, size_t bytes) {
  const size_t last = page_of(at + bytes - 1);
  for (size_t page = page_of(at); page <= last; ++page) mark_page(page);
}

void Disk::read_ahead(const char* at, size_t bytes) const {
  const size_t begin = page_of(at), end = page_of(at + bytes - 1) + 1;
  madvise(base_ + begin * PAGE, (end - begin) * PAGE, MADV_WILLNEED);
}

// The hand goes round once over pages marked since its last visit, and takes those that were not. What nobody has
// marked goes with its neighbours: it may be in memory all the same, by an access that was not announced.
Disk::Run Disk::next_victims() {
  Run run{hand_, hand_};
  while (run.end < num_pages_ && run.end - run.begin < MAX_RUN) {
    const uint8_t state = states_[run.end].load(std::memory_order_relaxed);
    if (state & RECENT) break;
    if (state && states_[run.end].exchange(0, std::memory_order_relaxed) & RESIDENT) --resident_;
    ++run.end;
  }
  hand_ = run.end;
  if (hand_ < num_pages_ && run.end - run.begin < MAX_RUN) states_[hand_++].fetch_and(RESIDENT, std::memory_order_relaxed);
  if (hand_ >= num_pages_) hand_ = 0;
  return run;
}

void Disk::trim() {
  if (resident_ <= bound_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (resident_ <= bound_) return;
  std::vector<Run> runs;
  while (resident_ > bound_ - bound_ / HYSTERESIS) {
    const Run run = next_victims();
    if (run.begin < run.end) runs.push_back(run);
  }
  drop(runs);
}

// Dirty pages of all runs are on their way to the disk before the first is waited for.
void Disk::drop(const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    madvise(base_ + run.begin * PAGE, (run.end - run.begin) * PAGE, MADV_DONTNEED);
    sync_file_range(file_, static_cast<off_t>(run.begin * PAGE), static_cast<off_t>((run.end - run.begin) * PAGE), SYNC_FILE_RANGE_WRITE);
  }
  for (const Run& run : runs) {
    const off_t at = static_cast<off_t>(run.begin * PAGE), bytes = static_cast<off_t>((run.end - run.begin) * PAGE);
    sync_file_range(file_, at, bytes, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    posix_fadvise(file_, at, bytes, POSIX_FADV_DONTNEED);
  }
}

void Disk::let_go(const char* at, size_t bytes) {
  std::vector<Run> runs;
  const size_t end = page_of(at + bytes - 1) + 1;
  for (size_t page = page_of(at); page < end; ++page) {
    if (states_[page].load(std::memory_order_relaxed) & RESIDENT) continue;
    if (!runs.empty() && runs.back().end == page) ++runs.back().end;
    else runs.push_back({page, page + 1});
  }
  drop(runs);
}

size_t Disk::resident_bytes(const char* at, size_t bytes) const {
  const size_t begin = page_of(at), end = page_of(at + bytes - 1) + 1;
  return PAGE * static_cast<size_t>(std::count_if(states_ + begin, states_ + end, [](const std::atomic<uint8_t>& state) {
           return state.load(std::memory_order_relaxed) & RESIDENT;
         }));
}

}  // namespace embedding
