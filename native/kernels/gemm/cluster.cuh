// cluster.cuh: blocks of a cluster. They have the slices of K of an output tile, 1, 2, 4 or 8, the macro SLICES; or, with one slice,
// 1 or 2 output tiles with the same columns, the macro SHARING: each block copies half of b to the shared memory of both. On a CPU
// a block sums all slices and shares nothing.
#pragma once

#ifdef __CUDA_ARCH__
#ifndef SLICES
#define SLICES 1
#endif
#ifndef SHARING
#define SHARING 1
#endif
#if SHARING > 1
#define CLUSTER_OF_SLICES __cluster_dims__(SHARING, 1, 1)
#elif SLICES > 1
#define CLUSTER_OF_SLICES __cluster_dims__(SLICES, 1, 1)
#endif
#endif
#ifndef CLUSTER_OF_SLICES
#define CLUSTER_OF_SLICES
#endif

namespace narrowgauge {

#ifdef __CUDA_ARCH__
constexpr int CLUSTER = SLICES, SHARERS = SHARING;
#else
constexpr int CLUSTER = 1, SHARERS = 1;
#endif
static_assert(CLUSTER == 1 || SHARERS == 1, "blocks with slices of a tile share no tile of b");

}  // namespace narrowgauge
