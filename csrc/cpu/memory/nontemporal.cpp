#include "nontemporal.h"

#include <cstdio>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

namespace sparse_ce {
namespace cpu {
namespace {

constexpr int64_t kMiB = int64_t(1) << 20;

// The cache that cores share; 0 where nobody says. sysconf counts all of a processor's where Linux knows the core's.
int64_t last_cache() {
  int64_t kib = 0;
  if (FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
    long found = 0;
    if (std::fscanf(file, "%ldK", &found) == 1) kib = found;
    std::fclose(file);
  }
  if (kib > 0) return kib << 10;
#ifdef _SC_LEVEL3_CACHE_SIZE
  return sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  return 0;
#endif
}

// Half of it; the other half is the logits'. From there on a reader that follows loses less by finding nothing in it
// than the writer gains (32 MiB, two Zen 4 cores, 2026-11-23).
int64_t too_large() {
  const int64_t cache = last_cache();
  return cache <= 0 ? 16 * kMiB : std::clamp(cache / 2, 4 * kMiB, 32 * kMiB);
}

}  // namespace

// Stores of 16 bytes fill the queue before their lines are whole, and float64 on AVX2 computes for longer than fetching
// its lines takes.
bool around_caches(const void* logits, const void* gradient, int64_t n, int64_t size) {
  static const int64_t most = too_large();
  const InstructionSet set = instruction_set_in_use();
  return logits != gradient && n * size >= most &&
         (set == InstructionSet::kAvx512 || (set == InstructionSet::kAvx2 && size < 8));
}

}  // namespace cpu
}  // namespace sparse_ce
