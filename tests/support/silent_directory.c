/* A directory whose file server doesn't answer: as long as $SILENT_FLAG exists, whoever opens, makes or writes something
   under $SILENT_DIRECTORY waits. To be preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void wait_for_answer(const char *path) {
    const char *directory = getenv("SILENT_DIRECTORY"), *flag = getenv("SILENT_FLAG");
    if (directory && flag && path && strncmp(path, directory, strlen(directory)) == 0)
        while (access(flag, F_OK) == 0) usleep(10000);
}

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 0) {
        path[length] = 0;
        wait_for_answer(path);
    }
    if (!real) real = dlsym(RTLD_NEXT, "write");
    return real(fd, data, size);
}

int mkdir(const char *path, mode_t mode) {
    static int (*real)(const char *, mode_t);
    wait_for_answer(path);
    if (!real) real = dlsym(RTLD_NEXT, "mkdir");
    return real(path, mode);
}

static int open_with(const char *name, const char *path, int flags, va_list arguments) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    wait_for_answer(path);
    return real(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    int fd = open_with("open", path, flags, arguments);
    va_end(arguments);
    return fd;
}

int open64(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    int fd = open_with("open64", path, flags, arguments);
    va_end(arguments);
    return fd;
}
