// strided_rows.h - Processes adjacent rows with strided classes, such as the pixels of images, without copying them.
// Each block of rows is processed column by column. The arguments must have `strided` set.
#pragma once

#include "../../ops/cross_entropy.h"

namespace sparse_ce {
namespace cpu {

void strided_forward(const ForwardArgs& args);
// `backward` reads what `forward` writes.
void strided_forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward);
void strided_backward(const BackwardArgs& args);
void strided_backward_values(const BackwardArgs& args);

}  // namespace cpu
}  // namespace sparse_ce
