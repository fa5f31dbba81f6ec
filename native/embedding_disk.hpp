// Records beyond a memory bound: one unlinked file, mapped whole, shared by any number of tables.
//
// A record keeps its address whether its page is in memory or not, so tables answer the same with and without a disk:
// an access that nobody announced is only slower. Pages in use are marked; beyond the bound the clock goes round,
// pages not marked again since its last visit are written and leave the page cache as well.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace embedding {

struct DiskError : std::runtime_error {
  DiskError(int code, const std::string& message) : std::runtime_error(message), code(code) {}
  int code;  // errno
};

class Disk {
 public:
  static constexpr size_t PAGE = 4096;
  using Pages = std::vector<size_t>;

  // Throws DiskError when the folder cannot hold the file.
  Disk(const std::string& folder, size_t memory_bytes);
  ~Disk() { close_all(); }
  Disk(const Disk&) = delete;

  // Zeros, with their place on disk already taken: a full disk is a DiskError here and never a signal later.
  char* allocate(size_t bytes);
  void free(char* at, size_t bytes);

  // A record's pages, for fetch.
  void add_pages(const char* at, size_t bytes, Pages& pages) const {
    const size_t last = page_of(at + bytes - 1);
    for (size_t page = page_of(at); page <= last; ++page) pages.push_back(page);
  }
  // Marks pages about to be used, makes room for them and reads those that are not in memory, all at once.
  void fetch(Pages& pages);
  // Marks the pages of a new record; room for them is made by the next fetch or trim.
  void mark(const char* at, size_t bytes);
  void trim();

  // A scan: reads a range without marking it, and lets go of what is not marked.
  void read_ahead(const char* at, size_t bytes) const;
  void let_go(const char* at, size_t bytes);

  size_t resident_bytes(const char* at, size_t bytes) const;

 private:
  enum : uint8_t { RESIDENT = 1, RECENT = 2 };
  struct Run { size_t begin, end; };
  size_t page_of(const char* at) const { return static_cast<size_t>(at - base_) / PAGE; }
  bool mark_page(size_t page);
  void close_all();
  Run next_victims();
  void drop(const std::vector<Run>& runs);

  const std::string folder_;
  const size_t bound_;  // pages
  int file_ = -1;
  char* base_ = nullptr;
  size_t reserved_ = 0;  // bytes of address space
  std::atomic<uint8_t>* states_ = nullptr;
  std::atomic<size_t> num_pages_{0}, resident_{0};
  size_t hand_ = 0;
  std::mutex mutex_;  // of the file's size and the clock
};

}  // namespace embedding
