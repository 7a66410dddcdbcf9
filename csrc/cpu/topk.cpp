#include "../topk.h"

#include "instruction_set.h"
#include "row_loops.h"

namespace sparse_ce {
namespace cpu {
namespace {

constexpr int64_t kTile = 1024;

// Whether any of n logits is among the k largest, or ties with the last of them.
template <typename scalar_t>
SCE_HD bool any_wanted(const scalar_t* logits, int64_t n, acc_type<scalar_t> last, bool largest) {
  const auto sign = static_cast<acc_type<scalar_t>>(largest ? 1 : -1);
  const auto least = sign * last;
  int wanted = 0;
#pragma omp simd reduction(| : wanted)
  for (int64_t i = 0; i < n; ++i) wanted |= sign * to_acc(logits[i]) >= least;
  return wanted != 0;
}

template <typename scalar_t>
void find(const TopkArgs& args, int64_t r) {
  using acc_t = acc_type<scalar_t>;
  TopkRow<acc_t> found(args, r);
  if (found.without()) return;
  const scalar_t* row = args.row<scalar_t>(r);
  for (int64_t begin = 0; begin < args.columns && !found.full(); begin += kTile) {
    const int64_t end = std::min(begin + kTile, args.columns);
    const bool any = with_instruction_set(
        [&](auto) SCE_INLINE { return any_wanted(row + begin, end - begin, found.last, found.largest); });
    for (int64_t i = begin; any && i < end; ++i) {
      const acc_t z = to_acc(row[i]);
      if (found.is_above(z)) found.put_above(found.found_above++, i);
      if (found.is_equal(z)) found.put_equal(found.found_equal++, i);
    }
  }
}

}  // namespace

void topk_ids(const TopkArgs& args) {
  with_storage(args.dtype, [&](auto storage) {
    parallel_rows(args.rows, args.columns, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) find<decltype(storage)>(args, r);
    });
  });
}

}  // namespace cpu
}  // namespace sparse_ce
