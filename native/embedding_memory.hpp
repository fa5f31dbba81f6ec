// Memory for what is read at random: huge pages from 2 MB on, because a TLB miss costs as much as the row itself.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace embedding {

constexpr size_t HUGE_PAGE = size_t{1} << 21;

struct Free { void operator()(char* p) const { std::free(p); } };
using Memory = std::unique_ptr<char, Free>;

inline Memory allocate(size_t bytes) {
  const size_t align = bytes < HUGE_PAGE ? 64 : HUGE_PAGE;
  const size_t rounded = (bytes + align - 1) / align * align;
  Memory memory(static_cast<char*>(std::aligned_alloc(align, rounded)));
  if (!memory) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (align == HUGE_PAGE) madvise(memory.get(), rounded, MADV_HUGEPAGE);  // a wish: without it, only slower
#endif
  return memory;
}

template <class T>
struct HugeAllocator {
  using value_type = T;
  HugeAllocator() = default;
  template <class U>
  HugeAllocator(const HugeAllocator<U>&) {}
  T* allocate(size_t size) { return reinterpret_cast<T*>(embedding::allocate(size * sizeof(T)).release()); }
  void deallocate(T* p, size_t) { std::free(p); }
  bool operator==(const HugeAllocator&) const { return true; }
  bool operator!=(const HugeAllocator&) const { return false; }
};

}  // namespace embedding
