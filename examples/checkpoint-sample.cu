// checkpoint-sample.cu: a buffer in GPU memory with a known pattern, hashed whenever it is asked to. checkpoint-sample.sh
// builds it, drives it and takes it through lock, checkpoint, restore and unlock.
//
//   nvcc -O2 -o checkpoint-sample examples/checkpoint-sample.cu
//   ./checkpoint-sample [MIB]
//
// Says "ready PID HASH" on standard output, then answers each line on standard input with "hash HASH", and ends with the
// end of its input. HASH is the FNV-1a hash of the whole buffer, read back from the GPU each time; before it answers it
// also compares every word with the pattern on the GPU, and exits with 1 where one differs. MIB is 256 by default.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>
#include <unistd.h>

// Splitmix64: neighbouring words have nothing in common, so that a shifted or torn copy shows.
__host__ __device__ static inline uint64_t pattern(uint64_t index) {
    uint64_t z = index * 0x9e3779b97f4a7c15ULL + 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

__global__ void fill(uint64_t *words, size_t count) {
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
        words[i] = pattern(i);
    }
}

__global__ void compare(const uint64_t *words, size_t count, unsigned long long *wrong) {
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
        if (words[i] != pattern(i)) {
            atomicAdd(wrong, 1ULL);
        }
    }
}

static void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "checkpoint-sample: %s: %s\n", what, cudaGetErrorString(error));
        std::exit(1);
    }
}

static uint64_t hash(const uint64_t *device, std::vector<uint64_t> &host) {
    check(cudaMemcpy(host.data(), device, host.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost), "read back");
    uint64_t value = 0xcbf29ce484222325ULL;
    const unsigned char *bytes = reinterpret_cast<const unsigned char *>(host.data());
    for (size_t i = 0; i < host.size() * sizeof(uint64_t); ++i) {
        value = (value ^ bytes[i]) * 0x100000001b3ULL;
    }
    return value;
}

int main(int argc, char **argv) {
    char *end = nullptr;
    const long mib = argc > 1 ? std::strtol(argv[1], &end, 10) : 256;
    if (argc > 2 || mib < 1 || mib > 1024 * 1024 || (end != nullptr && *end != '\0')) {
        std::fprintf(stderr, "usage: checkpoint-sample [MIB]\n");
        return 2;
    }
    const size_t count = (static_cast<size_t>(mib) << 20) / sizeof(uint64_t);

    uint64_t *words = nullptr;
    unsigned long long *wrong = nullptr;
    check(cudaMalloc(reinterpret_cast<void **>(&words), count * sizeof(uint64_t)), "cudaMalloc");
    check(cudaMalloc(reinterpret_cast<void **>(&wrong), sizeof *wrong), "cudaMalloc");
    check(cudaMemset(wrong, 0, sizeof *wrong), "cudaMemset");
    fill<<<256, 256>>>(words, count);
    check(cudaGetLastError(), "fill");
    check(cudaDeviceSynchronize(), "fill");

    std::vector<uint64_t> host(count);
    std::printf("ready %d %016llx\n", static_cast<int>(getpid()), static_cast<unsigned long long>(hash(words, host)));
    std::fflush(stdout);

    for (int byte = std::getchar(); byte != EOF; byte = std::getchar()) {
        if (byte != '\n') {
            continue;
        }
        compare<<<256, 256>>>(words, count, wrong);
        check(cudaGetLastError(), "compare");
        unsigned long long bad = 0;
        check(cudaMemcpy(&bad, wrong, sizeof bad, cudaMemcpyDeviceToHost), "compare");
        if (bad != 0) {
            std::fprintf(stderr, "checkpoint-sample: %llu of %zu words differ from the pattern\n", bad, count);
            return 1;
        }
        std::printf("hash %016llx\n", static_cast<unsigned long long>(hash(words, host)));
        std::fflush(stdout);
    }
    check(cudaFree(wrong), "cudaFree");
    check(cudaFree(words), "cudaFree");
    return 0;
}
