// counter.cu: a UDP server whose counter lives in GPU memory. It starts at 100; each packet adds one, and the answer is the
// new value as text. Killed and restored by rekindle, it continues to count, where a new process would start at 101.
//
//   nvcc -o counter examples/counter.cu
//   sudo rekindle run --name counter --interval 10s -- ./counter 10000
//   echo | nc -u -w 1 127.0.0.1 10000           101
//   (wait for a snapshot, then kill it hard)    sudo pkill -9 -x counter
//   echo | nc -u -w 1 127.0.0.1 10000           102
//
// The port is the first argument, 10000 by default. It listens on the loopback address only.

#include <arpa/inet.h>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/socket.h>
#include <unistd.h>

#include <cuda_runtime.h>

__device__ unsigned long long counter = 100;

__global__ void increment() { counter += 1; }

static void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "counter: %s: %s\n", what, cudaGetErrorString(error));
        std::exit(1);
    }
}

static void fail(const char *what) {
    std::fprintf(stderr, "counter: %s: %s\n", what, std::strerror(errno));
    std::exit(1);
}

int main(int argc, char **argv) {
    char *end = nullptr;
    const long port = argc > 1 ? std::strtol(argv[1], &end, 10) : 10000;
    if (argc > 2 || port < 1 || port > 65535 || (end != nullptr && *end != '\0')) {
        std::fprintf(stderr, "usage: counter [PORT]\n");
        return 2;
    }

    // Uses the GPU before the first packet: a snapshot taken until then is one of a CUDA process already.
    check(cudaFree(nullptr), "cudaFree");

    const int server = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (server < 0) {
        fail("socket");
    }
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<unsigned short>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(server, reinterpret_cast<const sockaddr *>(&address), sizeof address) != 0) {
        fail("bind");
    }
    std::printf("counter: process %d listens on 127.0.0.1:%ld\n", static_cast<int>(getpid()), port);
    std::fflush(stdout);

    for (;;) {
        char packet[64];
        sockaddr_in peer = {};
        socklen_t length = sizeof peer;
        const ssize_t got = recvfrom(server, packet, sizeof packet, 0, reinterpret_cast<sockaddr *>(&peer), &length);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            fail("recvfrom");
        }

        increment<<<1, 1>>>();
        check(cudaGetLastError(), "launch");
        unsigned long long value = 0;
        // Waits for the kernel: both are on the default stream.
        check(cudaMemcpyFromSymbol(&value, counter, sizeof value), "cudaMemcpyFromSymbol");

        char answer[32];
        const int size = std::snprintf(answer, sizeof answer, "%llu\n", value);
        if (sendto(server, answer, static_cast<size_t>(size), 0, reinterpret_cast<const sockaddr *>(&peer), length) < 0) {
            // The peer may be gone; the counter stays.
            std::fprintf(stderr, "counter: sendto: %s\n", std::strerror(errno));
        }
    }
}
