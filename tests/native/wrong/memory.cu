// memory.cu: kernels that are wrong on purpose, with a defect per kernel; the sanitizers have to find the line.
//
// x is an input of n elements, out an output of n; a block of 64 threads with a single wrong thread.

extern "C" __global__ void right(const int* x, int* out, int n) {
    __shared__ int part[64];
    const int t = threadIdx.x;
    part[t] = x[t % n];
    __syncthreads();
    if (t < n) out[t] = part[63 - t];
}

extern "C" __global__ void reads_behind_an_input(const int* x, int* out, int n) {
    const int t = threadIdx.x;
    if (t <= n) out[t % n] = x[t];  // the mistake: t < n
}

extern "C" __global__ void writes_before_an_output(const int* x, int* out, int n) {
    const int t = threadIdx.x;
    if (t < n) out[t - 1] = x[t];  // the mistake: thread 0 has no element before
}

template <class T>
__device__ void staged(const T* x, T* out, int n) {
    __shared__ T part[64];
    T* volatile mine = part + 60;  // volatile: the compiler cannot know the target
    const int t = threadIdx.x;
    if (t < 5) mine[t] = x[t % n];  // the mistake: t < 4
    __syncthreads();
    if (t < n) out[t] = mine[t % 4];
}

extern "C" __global__ void writes_outside_shared_memory(const int* x, int* out, int n) { staged(x, out, n); }

extern "C" __global__ void reads_outside_a_local_array(const int* x, int* out, int n) {
    int mine[4] = {x[0], x[1], x[2], x[3]};
    const int* volatile from = mine;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < n) out[threadIdx.x] = from[threadIdx.x];  // the mistake: there are four
}

extern "C" __global__ void overflows(const int* x, int* out, int n) {
    const int t = threadIdx.x;
    if (t < n) out[t] = x[t] + 0x7FFFFFFF - t;  // the mistake: an int holds no larger number
}

extern "C" __global__ void shifts_too_far(const int* x, int* out, int n) {
    const int t = threadIdx.x;
    if (t < n) out[t] = x[0] << (t + 28);  // the mistake: an int has 32 bits
}

extern "C" __global__ void loads_misaligned(const int* x, int* out, int n) {
    const int t = threadIdx.x;
    if (4 * t + 4 < n) out[t] = *reinterpret_cast<const int*>(reinterpret_cast<const char*>(x) + t);  // the mistake
}
