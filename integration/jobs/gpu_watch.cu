// gpu_watch.cu: what watches a GPU job has something to see: it works with a GPU and with no processor, then with neither,
// then it makes the GPU fail. Brought back from an image it finds the file FAULTED, lets that be and ends well.
//
//   gpu_watch FAULTED SECONDS     so long with the GPU, so long with nothing

#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <unistd.h>

#include <cuda_runtime.h>

__global__ void spin(long long clocks) {
    const long long begin = clock64();
    while (clock64() - begin < clocks) {
    }
}

// A device address that nothing is mapped at: an MMU fault, Xid 31.
__global__ void stray(int *where) { *where = 1; }

static void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        std::printf("gpu_watch: %s: %s\n", what, cudaGetErrorString(error));
        std::fflush(stdout);
        std::_Exit(3);
    }
}

int main(int argc, char **argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: gpu_watch FAULTED SECONDS\n");
        return 2;
    }
    const int seconds = std::atoi(argv[2]);
    // A thread that waits for the GPU sleeps, where it would spin by default.
    check(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync), "cudaSetDeviceFlags");
    int khz = 0;
    check(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0), "cudaDeviceGetAttribute");
    std::printf("works\n");
    std::fflush(stdout);
    for (int n = 0; n < 2 * seconds; ++n) {
        spin<<<1, 1>>>(static_cast<long long>(khz) * 500);
        check(cudaDeviceSynchronize(), "spin");
    }
    std::printf("waits\n");
    std::fflush(stdout);
    for (unsigned left = static_cast<unsigned>(seconds); left > 0;) {
        left = sleep(left);
    }
    const int fd = open(argv[1], O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0) {
        std::printf("went on\n");
        return 0;
    }
    close(fd);
    stray<<<1, 1>>>(reinterpret_cast<int *>(0x10));
    check(cudaDeviceSynchronize(), "stray");
    return 4;
}
