#include "../cross_entropy.h"

namespace sparse_ce {
namespace cpu {
namespace {

template <typename acc_t>
void mean_of(const MeanArgs& args) {
  MeanStats<double> stats;
  for (int64_t r = 0; r < args.target.rows; ++r) stats.merge(args.row<acc_t>(r));
  args.finish<acc_t>(stats);
}

}  // namespace

void mean(const MeanArgs& args) {
  args.dtype == DType::kFloat64 ? mean_of<double>(args) : mean_of<float>(args);
}

}  // namespace cpu
}  // namespace sparse_ce
