#include "nontemporal.h"

#include <cstdio>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

namespace sparse_ce {
namespace cpu {
namespace {

constexpr int64_t kMiB = int64_t(1) << 20;

// Returns the size of the cache that cores share, or 0 if it is unknown. sysconf reports the sum over the processor,
// while Linux reports the cache of one core.
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

// Returns the size from which a gradient bypasses the caches: half of the cache, since the logits use the other half.
// From this size on, a subsequent reader loses less than the writer gains (32 MiB, two Zen 4 cores, 2026-11-23).
int64_t too_large() {
  const int64_t cache = last_cache();
  return cache <= 0 ? 16 * kMiB : std::clamp(cache / 2, 4 * kMiB, 32 * kMiB);
}

}  // namespace

// Not used with 16-byte stores, which fill the store queue before their lines are complete. Not used for float64 on
// AVX2 either, where computing takes longer than fetching the lines.
bool use_nontemporal(const void* logits, const void* gradient, int64_t n, int64_t size) {
  static const int64_t most = too_large();
  const InstructionSet set = instruction_set_in_use();
  return logits != gradient && n * size >= most &&
         (set == InstructionSet::kAvx512 || (set == InstructionSet::kAvx2 && size < 8));
}

}  // namespace cpu
}  // namespace sparse_ce
