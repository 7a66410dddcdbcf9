#include "gradient_memory.h"

#if defined(__linux__)

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

constexpr size_t kBlocks = 2;  // a usual training step needs one block, a model with two losses needs two
constexpr size_t kHugePage = size_t(1) << 21;

struct Block {
  void* address;
  size_t bytes;
};

// Maps memory whose address and size are multiples of a huge page.
void* map_block(size_t bytes) {
  void* mapped = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(mapped);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + bytes, kHugePage - before);
#ifdef MADV_HUGEPAGE
  madvise(begin + before, bytes, MADV_HUGEPAGE);  // only a hint
#endif
  return begin + before;
}

// Returns true if a free block is still resident. Memory that the system reclaimed would come back in 4 KiB pages,
// because page tables that were split are not used for huge pages again.
bool intact(const Block& block) {
  for (size_t at = 0; at < block.bytes; at += kHugePage) {
    unsigned char resident = 0;
    if (mincore(static_cast<char*>(block.address) + at, 1, &resident) != 0 || !(resident & 1)) return false;
  }
  return true;
}

class BlockCache {
 public:
  void* acquire(size_t bytes) {
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < free_.size(); ++i) {
      const Block block = free_[i];
      if (block.bytes < bytes || block.bytes > bytes + bytes / 4) continue;
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
      if (!intact(block)) {
        munmap(block.address, block.bytes);
        break;
      }
      in_use_[block.address] = block.bytes;
      return block.address;
    }
    void* address = map_block(bytes);
    if (address) in_use_[address] = bytes;
    return address;
  }

  void release(void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = in_use_.find(address);
    if (found == in_use_.end()) return;
    const Block block{address, found->second};
    in_use_.erase(found);
#ifdef MADV_FREE
    if (madvise(block.address, block.bytes, MADV_FREE) == 0) {
      free_.push_back(block);
      if (free_.size() <= kBlocks) return;
      munmap(free_.front().address, free_.front().bytes);
      free_.erase(free_.begin());
      return;
    }
#endif
    munmap(block.address, block.bytes);
  }

 private:
  std::mutex mutex_;
  std::vector<Block> free_;                     // oldest first
  std::unordered_map<void*, size_t> in_use_;
};

// The cache is never destroyed, because tensors may be freed after static destructors have run.
BlockCache& cache() {
  static BlockCache* cache = new BlockCache;
  return *cache;
}

// SPARSE_CE_BLOCK_CACHE=0 makes every gradient use torch's allocator.
bool in_use() {
  static const bool enabled = [] {
    const char* value = std::getenv("SPARSE_CE_BLOCK_CACHE");
    return !value || std::strcmp(value, "0") != 0;
  }();
  return enabled;
}

}  // namespace

void* acquire_gradient_memory(size_t bytes) { return in_use() ? cache().acquire(bytes) : nullptr; }
void release_gradient_memory(void* block) { cache().release(block); }

}  // namespace cpu
}  // namespace sparse_ce

#else

namespace sparse_ce {
namespace cpu {
void* acquire_gradient_memory(size_t) { return nullptr; }
void release_gradient_memory(void*) {}
}  // namespace cpu
}  // namespace sparse_ce

#endif
