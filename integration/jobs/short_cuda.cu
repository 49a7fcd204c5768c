// A short CUDA program: makes the next state of the last one on the GPU, and prints it. A lost bit changes all that follow.
//
//     short_cuda STATE STEP

#include <cstdint>
#include <cstdio>
#include <cstdlib>

__device__ uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

__global__ void fill(uint64_t *cells, uint64_t count, uint64_t state) {
    uint64_t at = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    if (at < count) cells[at] = mix(state + at);
}

__global__ void sum(const uint64_t *cells, uint64_t count, unsigned long long *total) {
    uint64_t at = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    if (at < count) atomicAdd(total, (unsigned long long)mix(cells[at] ^ at));
}

static void need(cudaError_t result, const char *what) {
    if (result == cudaSuccess) return;
    fprintf(stderr, "short_cuda: %s: %s\n", what, cudaGetErrorString(result));
    exit(1);
}

int main(int, char **arguments) {
    const uint64_t count = 8 << 20, state = strtoull(arguments[1], nullptr, 16) + strtoull(arguments[2], nullptr, 10);
    uint64_t *cells;
    unsigned long long *total, found = 0;
    need(cudaMalloc(&cells, count * sizeof *cells), "cudaMalloc");
    need(cudaMalloc(&total, sizeof *total), "cudaMalloc");
    need(cudaMemset(total, 0, sizeof *total), "cudaMemset");
    fill<<<(count + 255) / 256, 256>>>(cells, count, state);
    sum<<<(count + 255) / 256, 256>>>(cells, count, total);
    need(cudaMemcpy(&found, total, sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
    printf("%016llx\n", found);
    return 0;
}
