#include "../cross_entropy.h"

namespace sparse_ce {
namespace cpu {
namespace {

template <typename acc_t>
void mean_of(const MeanArgs& args) {
  MeanStats<double> stats;
  for (int64_t r = 0; r < args.target.rows; ++r)
    stats.merge({static_cast<const acc_t*>(args.loss)[r * args.loss_stride], args.target.count<acc_t>(r)});
  *static_cast<acc_t*>(args.mean) = static_cast<acc_t>(stats.mean());
  *static_cast<acc_t*>(args.divisor) = static_cast<acc_t>(stats.divisor());
}

}  // namespace

void mean(const MeanArgs& args) {
  args.dtype == DType::kFloat64 ? mean_of<double>(args) : mean_of<float>(args);
}

}  // namespace cpu
}  // namespace sparse_ce
