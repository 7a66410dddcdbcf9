#include "../ops/loss_mean.h"

namespace sparse_ce {
namespace cpu {
namespace {

template <typename acc_t>
void mean_of(const LossMeanArgs& args) {
  LossMeanStats<double> stats;
  for (int64_t r = 0; r < args.target.rows; ++r) stats.merge(args.row<acc_t>(r));
  args.finish<acc_t>(stats);
}

}  // namespace

void loss_mean(const LossMeanArgs& args) {
  args.dtype == DType::kFloat64 ? mean_of<double>(args) : mean_of<float>(args);
}

}  // namespace cpu
}  // namespace sparse_ce
