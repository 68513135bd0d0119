// monitor.h: writes the finding of a sanitizer and its CUDA thread to a file, and ends the process.
//
// A separate library, loaded before the runtimes of the sanitizers, with their hooks. A finding is a line of the file
// $NARROWGAUGE_FINDINGS.<process id>: kind, description, source line and CUDA thread, separated by tabs. The reports of the
// runtimes are not printed, because they name threads of the host.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <execinfo.h>
#include <fcntl.h>
#include <unistd.h>

extern "C" {
void* __asan_get_report_address();
int __asan_get_report_access_type();
std::size_t __asan_get_report_access_size();
const char* __asan_get_report_description();
const char* __asan_locate_address(void*, char*, std::size_t, void**, std::size_t*);
void __sanitizer_symbolize_pc(void*, const char*, char*, std::size_t);
void __ubsan_get_current_report_data(const char**, const char**, const char**, unsigned*, unsigned*, char**);

using Say = void (*)(char* text, std::size_t size);
static thread_local Say say = nullptr;

// Registers the function that writes the kernel and CUDA thread running on this OS thread; null after the kernel.
__attribute__((visibility("default"))) void narrowgauge_running(Say running) { say = running; }
}

namespace {

constexpr int FINDING_EXIT_STATUS = 77;

void write_down(const char* kind, const char* what, const char* place) {
    char thread[512] = "";
    if (say != nullptr) say(thread, sizeof thread);
    if (const char* folder = std::getenv("NARROWGAUGE_FINDINGS")) {
        char path[4096];
        std::snprintf(path, sizeof path, "%s.%d", folder, static_cast<int>(getpid()));
        const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
        if (file >= 0) dprintf(file, "%s\t%s\t%s\t%s\n", kind, what, place, thread);
    }
    _exit(FINDING_EXIT_STATUS);
}

const char* name_of(const char* path) {
    const char* slash = std::strrchr(path, '/');
    return slash == nullptr ? path : slash + 1;
}

// The innermost source line of a kernel on the stack: a call of the kernel, such as memcpy, may have caused the finding.
void kernel_line(char* place, std::size_t size) {
    void* frames[64];
    const int count = backtrace(frames, 64);
    for (int i = 0; i < count; ++i) {
        char line[1024] = "";
        __sanitizer_symbolize_pc(static_cast<char*>(frames[i]) - 1, "%s:%l", line, sizeof line);
        if (std::strstr(line, ".cu:") == nullptr && std::strstr(line, ".cuh:") == nullptr) continue;
        std::snprintf(place, size, "%s", name_of(line));
        return;
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void __asan_on_error() {
    char what[512], place[512] = "";
    void* start = nullptr;
    std::size_t bytes = 0;
    void* address = __asan_get_report_address();
    const char* kind = __asan_get_report_description();
    const std::size_t size = __asan_get_report_access_size();
    const char* does = __asan_get_report_access_type() != 0 ? "writes" : "reads";
    if (size == 0)
        std::snprintf(what, sizeof what, "the address cannot be accessed");
    else
        std::snprintf(what, sizeof what, "%s %zu byte%s", does, size, size == 1 ? "" : "s");
    const std::size_t used = std::strlen(what);
    if (std::strcmp(kind, "use-after-poison") == 0) {
        std::snprintf(what + used, sizeof what - used, " in a guard zone, outside a tensor");
    } else if (std::strncmp(kind, "heap-", 5) == 0) {  // not for variables: locating a variable deadlocks on a lock
        __asan_locate_address(address, nullptr, 0, &start, &bytes);
        const long long off = static_cast<char*>(address) - static_cast<char*>(start);
        std::snprintf(what + used, sizeof what - used, " at byte %lld of an allocation of %zu", off, bytes);
    }
    kernel_line(place, sizeof place);
    write_down(kind, what, place);
}

extern "C" __attribute__((visibility("default"))) void __ubsan_on_report() {
    const char *kind = "", *what = "", *file = "";
    unsigned line = 0, column = 0;
    char* address = nullptr;
    __ubsan_get_current_report_data(&kind, &what, &file, &line, &column, &address);
    char place[512];
    std::snprintf(place, sizeof place, "%s:%u", name_of(file), line);
    write_down(kind, what, place);
}
