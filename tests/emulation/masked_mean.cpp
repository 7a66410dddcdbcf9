// Masked means of nests of every kind, and their gradients, against a float64 reference.
#include "harness.h"

#include "../../csrc/cuda/masked_mean.cu"

namespace {

struct Axis {
  int64_t size;
  bool kept, masked;  // masked: the mask differs along it
};

struct Case {
  DType dtype, mask_dtype;
  std::vector<Axis> axes;  // outermost first; the last are the columns
  int64_t offset, mask_offset, gap, max_blocks;
  double hidden;
  std::string text() const {
    std::string out = "dtype " + std::to_string(int(dtype)) + " mask " + std::to_string(int(mask_dtype)) + " axes";
    for (const Axis& axis : axes)
      out += " " + std::to_string(axis.size) + (axis.kept ? "k" : "r") + (axis.masked ? "m" : "");
    char rest[128];
    std::snprintf(rest, sizeof(rest), " offsets %ld %ld gap %ld max_blocks %ld", long(offset), long(mask_offset),
                  long(gap), long(max_blocks));
    return out + rest;
  }
};

Case draw(bool small) {
  Case c{};
  c.dtype = one_of<DType>({DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16});
  c.mask_dtype = one_of<DType>({DType::kUInt8, DType::kUInt8, DType::kUInt8, DType::kFloat32, DType::kFloat64,
                                DType::kFloat16, DType::kBFloat16, DType::kInt32, DType::kInt64});
  // Deep: so many elements behind an output that they are shared among blocks.
  const bool deep = chance(0.4), packed = chance(0.6);
  const int64_t behind = 17000 + below(small ? 3000 : 20000);
  int64_t elements = small ? 2000 : 9000;
  const int dims = 1 + int(below(4));
  for (int d = 0; d < dims; ++d) {
    const int64_t most = deep && d + 2 < dims ? 2 : chance(0.5) ? 9 : 70;
    const int64_t size = std::min(elements, 1 + below(most));
    c.axes.push_back({size, chance(0.45), chance(0.75)});
    elements = std::max<int64_t>(1, elements / size);
  }
  Axis& columns = c.axes.back();
  if (packed) columns.size = 8 * (1 + below(10));
  if (deep && (dims == 1 || chance(0.4))) {
    const int64_t size = chance(0.4) ? behind / 7 : behind;
    columns = {packed ? size / 8 * 8 : size, false, columns.masked};
    if (dims > 1) c.axes[size_t(dims - 2)].size = 1 + below(3);
  } else if (deep) {
    if (chance(0.8)) columns.kept = true;
    c.axes[size_t(dims - 2)] = {1 + behind / std::min<int64_t>(columns.size, 32), false, chance(0.75)};
  }
  if (packed && chance(0.7)) c.mask_dtype = chance(0.6) || c.dtype == DType::kFloat64 ? DType::kUInt8 : DType::kFloat32;
  const bool aligned = packed || chance(0.3);
  c.offset = aligned ? 8 * below(2) : below(9), c.mask_offset = aligned ? 8 * below(2) : below(9);
  c.gap = chance(0.6) ? 0 : chance(0.5) ? 8 * below(3) : below(4);
  c.max_blocks = chance(0.5) ? 0 : 1 + below(3);
  c.hidden = one_of<double>({0, 0.2, 0.5, 0.95, 1});
  return c;
}

// The strides of a nest of tensors: the input with gaps between rows, the mask without the axes that it repeats.
MaskedMeanArgs nest_of(const Case& c, bool dense) {
  MaskedMeanArgs args{};
  Place stride{1, 1, 1};
  std::vector<Place> strides(c.axes.size());
  for (size_t d = c.axes.size(); d-- > 0;) {
    const Axis& axis = c.axes[d];
    strides[d] = {stride.input, axis.masked ? stride.mask : 0, axis.kept ? stride.out : 0};
    stride.input = stride.input * axis.size + (d + 1 == c.axes.size() && !dense ? c.gap : 0);
    if (axis.masked) stride.mask *= axis.size;
    if (axis.kept) stride.out *= axis.size;
  }
  for (size_t d = 0; d + 1 < c.axes.size(); ++d) {
    Axes& into = c.axes[d].kept ? args.outer : args.rows;
    into.size[into.dims] = c.axes[d].size, into.count *= c.axes[d].size;
    into.stride[into.dims++] = strides[d];
  }
  args.columns = c.axes.back().size, args.column = strides.back(), args.columns_kept = c.axes.back().kept;
  args.dtype = c.dtype, args.mask_dtype = c.mask_dtype, args.max_blocks = c.max_blocks;
  return args;
}

std::string kind_of(const Case& c) {
  MaskedMeanArgs args = nest_of(c, false);
  args.input = reinterpret_cast<const void*>(c.offset * size_of(c.dtype));  // only their alignment counts
  args.mask = reinterpret_cast<const void*>(c.mask_offset * size_of(c.mask_dtype));
  const cuda::Plan plan = cuda::plan_of(args);
  const std::string across = plan.pack > 1 ? "across by packs" : "across by singles";
  const std::string way = args.columns_kept ? across : plan.warp_items ? "along, a warp" : "along, a block";
  return way + (plan.parts > 1 ? ", in parts" : "");
}

// Calls f with the place of every element.
template <typename function_t>
void for_places(const MaskedMeanArgs& args, const function_t& f) {
  for (int64_t o = 0; o < args.outer.count; ++o)
    for (int64_t r = 0; r < args.rows.count; ++r)
      for (int64_t i = 0; i < args.columns; ++i) {
        Place place = args.outer.at(o).moved(args.column, i);
        place.move(args.rows.at(r), 1);
        f(place);
      }
}

void run_case(const Case& c) {
  MaskedMeanArgs args = nest_of(c, false), back = nest_of(c, true);
  Place last;
  for_places(args, [&](const Place& place) {
    last.input = std::max(last.input, place.input), last.mask = std::max(last.mask, place.mask);
    last.out = std::max(last.out, place.out);
  });
  const int64_t count = args.outer.count * args.rows.count * args.columns;
  const DType acc = c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Array input(c.dtype, last.input + 1, c.offset), mask(c.mask_dtype, last.mask + 1, c.mask_offset);
  Array mean(c.dtype, last.out + 1), divisor(acc, last.out + 1), share(acc, last.out + 1, below(3));
  Array gradient(c.dtype, count, chance(0.5) ? 0 : below(9));
  const bool integer = c.mask_dtype == DType::kUInt8 || c.mask_dtype == DType::kInt32 || c.mask_dtype == DType::kInt64;
  for (int64_t i = 0; i <= last.mask; ++i)
    mask.set(i, chance(c.hidden) ? 0 : !integer && chance(0.5) ? 0.25 : double(1 + below(2)));
  for (int64_t i = 0; i <= last.input; ++i) input.set(i, NAN);  // what lies between the elements, or is hidden
  for_places(args, [&](const Place& place) {
    if (mask.get(place.mask) != 0) input.set(place.input, uniform(-1, 3));
  });
  for (int64_t i = 0; i <= last.out; ++i) mean.set(i, 777), divisor.set(i, 777), share.set(i, uniform(-1, 1));
  for (int64_t i = 0; i < count; ++i) gradient.set(i, 777);
  for (Array* a : {&input, &mask, &mean, &divisor, &share, &gradient}) a->upload();

  args.input = input.device(), args.mask = mask.device(), args.mean = mean.device(), args.divisor = divisor.device();
  const size_t bytes = cuda::masked_mean_workspace(args);
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
    compare("gradient", place.out, place.input, gradient.get(place.input), exact,
            w == 0 ? 0 : (ulp + eps) * std::fabs(exact) + least);
  });
}

}  // namespace

int main(int argc, char** argv) { return run_seeds(argc, argv, draw, kind_of, run_case); }
