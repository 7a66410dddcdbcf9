// Compares masked means of tensors with various strides, and their gradients, with a float64 reference.
#include "harness.h"

#include "../../csrc/cuda/masked_mean.cu"

namespace sparse_ce {
namespace {

struct Run {
  int64_t size;
  bool kept, masked;  // masked: the mask varies along this run
};

struct Case {
  DType dtype, mask_dtype;
  std::vector<Run> runs;  // outermost first: at most one kept and one reduced run, then the columns
  int64_t offset, mask_offset, gap, max_blocks;
  double hidden;
  bool selects;
  std::string text() const {
    std::string out = "dtype " + std::to_string(int(dtype)) + " mask " + std::to_string(int(mask_dtype)) + " runs";
    for (const Run& run : runs)
      out += " " + std::to_string(run.size) + (run.kept ? "k" : "r") + (run.masked ? "m" : "");
    char rest[128];
    std::snprintf(rest, sizeof(rest), " offsets %ld %ld gap %ld max_blocks %ld%s", long(offset), long(mask_offset),
                  long(gap), long(max_blocks), selects ? " bool" : "");
    return out + rest;
  }
};

Case draw(bool small) {
  Case c{};
  c.dtype = one_of<DType>({DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16});
  const DType number = c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  c.mask_dtype = chance(0.6) ? DType::kUInt8 : number;
  // `deep` cases have so many elements per output that blocks share them.
  const bool deep = chance(0.6), packed = chance(0.4), outer_first = chance(0.7);
  // Sometimes there are more parts than a warp merges at once.
  const int64_t behind = chance(0.06)  ? (cuda::kWarp + 2) * cuda::kSpan + below(9000)
                         : chance(0.3) ? 2100 + below(9000)
                                       : 17000 + below(small ? 3000 : 20000);
  const bool outer = chance(0.6), rows = chance(0.7);
  for (const bool kept : {outer_first, !outer_first})
    if (kept ? outer : rows) c.runs.push_back({1 + below(chance(0.5) ? 9 : small ? 20 : 70), kept, chance(0.75)});
  c.runs.push_back({1 + below(chance(0.3) ? 9 : small ? 60 : 300), chance(0.6), chance(0.75)});
  Run& columns = c.runs.back();
  if (packed) columns.size = 8 * (1 + below(10));
  if (deep && (!columns.kept || !rows)) {
    columns.kept = false, columns.size = rows && chance(0.4) ? behind / 7 : behind;
    for (Run& run : c.runs)
      if (&run != &columns) run.size = 1 + below(rows && !run.kept ? 7 : 3);
  } else if (deep) {
    for (Run& run : c.runs)
      if (&run != &columns) run.size = run.kept ? 1 + below(2) : 1 + behind / std::min<int64_t>(columns.size, 64);
  }
  const bool selects = c.mask_dtype == DType::kUInt8 && chance(0.5);
  const bool fills = selects && chance(0.3);  // every lane of a warp, or every thread of a block, has a pack
  if (fills) {
    const int64_t most = chance(0.5) ? 136 + below(500) : behind;
    c.runs = {{1 + below(3), true, chance(0.8)}, {1 + below(3), false, true}, {most / 8 * 8, false, true}};
    if (chance(0.4)) c.runs = {{most, false, true}};  // may end with part of a pack
  }
  const bool aligned = packed || fills || chance(0.3);
  c.offset = aligned ? 8 * below(2) : below(9), c.mask_offset = aligned ? 8 * below(2) : below(9);
  // Rows begin at a boundary, while the mask's rows or the ends of rows do not.
  const bool gapless = fills || chance(0.6);
  c.gap = chance(0.2) ? (8 - c.runs.back().size % 8) % 8 : gapless ? 0 : chance(0.5) ? 8 * below(3) : below(4);
  if (chance(0.01))  // so many rows that a warp processes a long one
    c.runs = {{cuda::kManyRows, true, chance(0.5)}, {cuda::kLong + 4 * (1 + below(4)), false, chance(0.5)}};
  c.max_blocks = chance(0.5) ? 0 : 1 + below(3);
  c.hidden = one_of<double>({0, 0.2, 0.5, 0.95, 1});
  c.selects = selects;
  return c;
}

// Computes the strides: the input has gaps between rows, and the mask lacks the axes that it repeats.
MaskedMeanArgs args_of(const Case& c, bool dense) {
  MaskedMeanArgs args{};
  Place stride{1, 1, 1};
  for (size_t d = c.runs.size(); d-- > 0;) {
    const Run& run = c.runs[d];
    Axis& axis = d + 1 == c.runs.size() ? args.columns : run.kept ? args.outer : args.rows;
    axis = {run.size, {stride.input, run.masked ? stride.mask : 0, run.kept ? stride.out : 0}};
    stride.input = stride.input * run.size + (d + 1 == c.runs.size() && !dense ? c.gap : 0);
    if (run.masked) stride.mask *= run.size;
    if (run.kept) stride.out *= run.size;
  }
  args.dtype = c.dtype, args.mask_dtype = c.mask_dtype, args.max_blocks = c.max_blocks;
  args.selects = c.selects;
  return args;
}

Kinds kind_of(const Case& c) {
  MaskedMeanArgs args = args_of(c, false);
  args.input = reinterpret_cast<const void*>(c.offset * size_of(c.dtype));  // only the alignment matters
  args.mask = reinterpret_cast<const void*>(c.mask_offset * size_of(c.mask_dtype));
  const cuda::Plan plan = cuda::plan_of(args);
  const std::string way = args.columns_kept() ? "across" : plan.warps ? "along, a warp" : "along, a block";
  Kinds kinds = {way + (plan.pack > 1 ? " by packs" : " by singles") + (plan.parts > 1 ? ", in parts" : "")};
  if (plan.warps && args.rows.size * args.columns.size > cuda::kLong) kinds.push_back("along, a warp, long");
  if (plan.selects) kinds.push_back(plan.warps ? "selected, a warp" : "selected, a block");
  if (plan.parts > cuda::kWarp) kinds.push_back("parts merged by a warp");
  return kinds;
}

// Calls f with the place of every element.
template <typename function_t>
void for_places(const MaskedMeanArgs& args, const function_t& f) {
  for (int64_t o = 0; o < args.outer.size; ++o)
    for (int64_t r = 0; r < args.rows.size; ++r)
      for (int64_t i = 0; i < args.columns.size; ++i)
        f(Place{}.moved(args.outer.stride, o).moved(args.rows.stride, r).moved(args.columns.stride, i));
}

void run_case(const Case& c) {
  MaskedMeanArgs args = args_of(c, false), back = args_of(c, true);
  Place last;
  for_places(args, [&](const Place& place) {
    last.input = std::max(last.input, place.input), last.mask = std::max(last.mask, place.mask);
    last.out = std::max(last.out, place.out);
  });
  const int64_t count = args.outer.size * args.rows.size * args.columns.size;
  const DType acc = c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Array input(c.dtype, last.input + 1, c.offset), mask(c.mask_dtype, last.mask + 1, c.mask_offset);
  Array mean(c.dtype, last.out + 1), divisor(acc, last.out + 1), share(acc, last.out + 1, below(3));
  Array gradient(c.dtype, count, chance(0.5) ? 0 : below(9));
  for (int64_t i = 0; i <= last.mask; ++i)
    mask.set(i, chance(c.hidden)                               ? 0
                : c.selects                                    ? 1
                : c.mask_dtype != DType::kUInt8 && chance(0.5) ? 0.25
                                                               : double(1 + below(2)));
  for (int64_t i = 0; i <= last.input; ++i) input.set(i, NAN);  // gaps between elements, and masked elements
  for_places(args, [&](const Place& place) {
    if (mask.get(place.mask) != 0) input.set(place.input, uniform(-1, 3));
  });
  for (int64_t i = 0; i <= last.out; ++i) mean.set(i, 777), divisor.set(i, 777), share.set(i, uniform(-1, 1));
  for (int64_t i = 0; i < count; ++i) gradient.set(i, 777);
  for (Array* a : {&input, &mask, &mean, &divisor, &share, &gradient}) a->upload();

  args.input = input.device(), args.mask = mask.device(), args.mean = mean.device(), args.divisor = divisor.device();
  const size_t bytes = cuda::workspace_of(args);
  void* workspace = nullptr;
  if (bytes > 0) must(cudaMalloc(&workspace, bytes), "malloc");
  must(cuda::masked_mean(args, workspace, nullptr), "masked_mean");
  if (workspace) cudaFree(workspace);
  back.mask = mask.device(), back.share = share.device(), back.grad_input = gradient.device();
  must(cuda::masked_mean_backward(back, nullptr), "masked_mean_backward");
  mean.download(), divisor.download(), gradient.download();

  std::vector<long double> sum(size_t(last.out + 1)), absolute(sum), weight(sum);
  for_places(args, [&](const Place& place) {
    const long double w = mask.get(place.mask), term = w == 0 ? 0 : w * input.get(place.input);
    sum[size_t(place.out)] += term, absolute[size_t(place.out)] += std::fabs(term), weight[size_t(place.out)] += w;
  });
  const double ulp = c.dtype == DType::kFloat16 ? 0x1p-11 : c.dtype == DType::kBFloat16 ? 0x1p-8 : 0;
  const double eps = c.dtype == DType::kFloat64 ? 4e-15 : 2e-6, least = c.dtype == DType::kFloat16 ? 6e-8 : 1e-37;
  for (int64_t i = 0; i <= last.out; ++i) {
    const double d = weight[size_t(i)] == 0 ? 1 : double(weight[size_t(i)]), exact = double(sum[size_t(i)] / d);
    compare("mean", i, 0, mean.get(i), exact, ulp * std::fabs(exact) + eps * double(absolute[size_t(i)]) / d + least);
    compare("divisor", i, 0, divisor.get(i), d, eps * d);
  }
  for_places(back, [&](const Place& place) {
    const double w = mask.get(place.mask), exact = w == 0 ? 0 : w * share.get(place.out);
    const double ours = gradient.get(place.input);
    if (w == 0)
      compare_bits("gradient of what is hidden", place.out, place.input, ours, 0);
    else
      compare("gradient", place.out, place.input, ours, exact, (ulp + eps) * std::fabs(exact) + least);
  });
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw, kind_of, run_case);
}
