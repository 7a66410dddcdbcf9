// Finds the k largest logits of each row. A row is read once to find the maximum of each block. The k-th largest of
// these maxima is a lower bound for the k-th largest logit, and in unordered rows a close one, so few blocks exceed it.
#include "../core/math.h"
#include "../ops/topk.h"

#include "instruction_set.h"
#include "rows/row_loops.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

constexpr int64_t kBlock = 64;

template <typename scalar_t>
SCE_HD void find_highest(const scalar_t* logits, int64_t columns, bool largest, order_type<scalar_t>* highest) {
  const auto of_block = [&](int64_t begin, int64_t n) SCE_INLINE {
    auto most = std::numeric_limits<order_type<scalar_t>>::min();
    SCE_SIMD(reduction(max : most))
    for (int64_t i = begin; i < begin + n; ++i) most = std::max(most, order_of(logits[i], largest));
    return most;
  };
  int64_t begin = 0;
  for (; begin + kBlock <= columns; begin += kBlock) *highest++ = of_block(begin, kBlock);
  if (begin < columns) *highest = of_block(begin, columns - begin);
}

template <typename scalar_t>
class Finder {
 public:
  explicit Finder(const TopkArgs& args)
      : args_(args), blocks_(static_cast<size_t>((args.columns + kBlock - 1) / kBlock)), highest_(blocks_),
        copy_(blocks_), listed_(2 * kBlock) {}

  void find(int64_t r) {
    const scalar_t* row = args_.row<scalar_t>(r);
    int64_t count = 0;
    with_instruction_set([&](auto) SCE_INLINE {
      find_highest(row, args_.columns, args_.largest, highest_.data());
      count = list(row, least());
    });
    const auto before = [](const auto& a, const auto& b) { return a.before(b); };
    Candidate<scalar_t>* listed = listed_.data();
    std::nth_element(listed, listed + args_.k, listed + count, before);
    std::sort(listed, listed + args_.k, before);
    for (int64_t i = 0; i < args_.k; ++i) args_.ids[r * args_.k + i] = listed_[static_cast<size_t>(i)].id;
  }

 private:
  using order_t = order_type<scalar_t>;

  // Returns a bound that at least k logits reach.
  order_t least() {
    if (static_cast<size_t>(args_.k) > blocks_) return std::numeric_limits<order_t>::min();
    copy_ = highest_;
    std::nth_element(copy_.begin(), copy_.begin() + args_.k - 1, copy_.end(), std::greater<order_t>());
    return copy_[static_cast<size_t>(args_.k - 1)];
  }

  // Lists the logits that reach the bound, except for ties that come after the first k. Returns their number.
  SCE_HD int64_t list(const scalar_t* row, order_t least) {
    int64_t count = 0, equal = 0;
    for (size_t b = 0; b < blocks_; ++b) {
      if (highest_[b] < least || (highest_[b] == least && equal >= args_.k)) continue;
      const int64_t begin = static_cast<int64_t>(b) * kBlock, n = std::min(kBlock, args_.columns - begin);
      if (listed_.size() < static_cast<size_t>(count + kBlock)) listed_.resize(listed_.size() * 2);
      order_t orders[kBlock];
      SCE_SIMD()
      for (int64_t i = 0; i < n; ++i) orders[i] = order_of(row[begin + i], args_.largest);
      Candidate<scalar_t>* listed = listed_.data();
      for (int64_t i = 0; i < n; ++i) {  // branch-free, because the outcome is unpredictable
        listed[count] = {orders[i], static_cast<int32_t>(begin + i)};
        count += orders[i] >= least;
        equal += orders[i] == least;
      }
    }
    return count;
  }

  const TopkArgs& args_;
  const size_t blocks_;
  std::vector<order_t> highest_, copy_;
  std::vector<Candidate<scalar_t>> listed_;
};

}  // namespace

void topk_ids(const TopkArgs& args) {
  with_storage(args.dtype, [&](auto storage) {
    parallel_rows(args.rows, args.columns, [&](int64_t begin, int64_t end) {
      Finder<decltype(storage)> finder(args);
      for (int64_t r = begin; r < end; ++r) finder.find(r);
    });
  });
}

}  // namespace cpu
}  // namespace sparse_ce
