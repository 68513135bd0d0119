// cluster.cuh: slices of K of an output tile, 1, 2, 4 or 8, the macro SLICES, and blocks of a cluster. On a CPU a block sums all
// slices.
#pragma once

#ifdef __CUDA_ARCH__
#ifndef SLICES
#define SLICES 1
#endif
#if SLICES > 1
#define CLUSTER_OF_SLICES __cluster_dims__(SLICES, 1, 1)
#endif
#endif
#ifndef CLUSTER_OF_SLICES
#define CLUSTER_OF_SLICES
#endif

namespace narrowgauge {

#ifdef __CUDA_ARCH__
constexpr int CLUSTER = SLICES;
#else
constexpr int CLUSTER = 1;
#endif

}  // namespace narrowgauge
