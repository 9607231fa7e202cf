/* The wall clock of a program and of all that it starts, set by somebody else: so many seconds are added to it, which stand
 * in a file that can be changed at any time. The monotonic clocks stay as they are. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    char text[32] = {0};
    int fd = open(SHIFT_FILE, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    return got > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *when) {
    int answer = (int)syscall(SYS_clock_gettime, clock, when);
    if (answer == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        when->tv_sec += shift();
    return answer;
}

int gettimeofday(struct timeval *restrict when, void *restrict zone) {
    int answer = (int)syscall(SYS_gettimeofday, when, zone);
    if (answer == 0)
        when->tv_sec += shift();
    return answer;
}

time_t time(time_t *when) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (when != NULL)
        *when = now.tv_sec;
    return now.tv_sec;
}
