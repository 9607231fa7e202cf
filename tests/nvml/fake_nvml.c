/* A stand-in for libnvidia-ml.so.1: what nvidia-ml-py calls for hangguard, answered from a text file.
 *
 * The file named by STANDIN_NVML_STATE is read again at every call (tests/standin.py writes it):
 *     gpus 2
 *     uuid 0 GPU-…              name 0 Stand-in GPU
 *     memory 0 USED TOTAL       utilization 0 PERCENT      power 0 MILLIWATTS
 *     compute 0 PID:BYTES …     graphics 0 PID:BYTES …     (BYTES "-": not available)
 *     mig 0 MIG-… MIG-…         (the slice at index N is of GPU instance N + 1)
 *     events 0 TYPES            ecc 0 UNCORRECTED          rows 0 CORRECTED UNCORRECTED PENDING FAILED
 *     fabric 0 STATE STATUS HEALTH
 *     driver VERSION CUDA               (CUDA as 1000 * major + 10 * minor)
 *     event GPU TYPE DATA INSTANCE      one line an event, told once to every event set that was open by then
 *     hang FUNCTION [GPU]       fail FUNCTION CODE [GPU]
 * Every opening appends the caller's pid to STATE.opened. Built with -DOLD_DRIVER it lacks what drivers
 * before 510 lack, and events, remapped rows and the fabric as well. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilization_t;

typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef struct { unsigned version; unsigned char cluster[16]; unsigned status, clique, state, health; } fabric_v2_t;
typedef struct { int told; unsigned long long types[64]; } event_set_t;

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, UNKNOWN = 999 };
enum { SLICE = 1000, LINE = 65536 };

static FILE *state(void) {
    const char *path = getenv("STANDIN_NVML_STATE");
    return path ? fopen(path, "r") : NULL;
}

/* Copy what follows "KEY GPU " in the file; 1 if there is such a line. */
static int find(const char *key, int gpu, char *value, size_t size) {
    char line[LINE], wanted[128];
    FILE *file = state();
    int found = 0;
    snprintf(wanted, sizeof wanted, "%s %d ", key, gpu);
    while (file && !found && fgets(line, sizeof line, file)) {
        if (strncmp(line, wanted, strlen(wanted)) == 0) {
            line[strcspn(line, "\n")] = 0;
            snprintf(value, size, "%s", line + strlen(wanted));
            found = 1;
        }
    }
    if (file) fclose(file);
    return found;
}

/* Hang or fail, if the file says so for this function (and GPU; -1: none). */
static int obey(const char *function, int gpu) {
    char line[LINE], name[128];
    FILE *file = state();
    int result = SUCCESS, code, only;
    if (!file) return UNKNOWN;
    while (fgets(line, sizeof line, file)) {
        only = -1;
        if (sscanf(line, "hang %127s %d", name, &only) >= 1 && strcmp(name, function) == 0
            && (only < 0 || only == gpu))
            for (;;) pause();
        only = -1;
        if (sscanf(line, "fail %127s %d %d", name, &code, &only) >= 2 && strcmp(name, function) == 0
            && (only < 0 || only == gpu))
            result = code;
    }
    fclose(file);
    return result;
}

static int gpu_of(void *handle) { return (int)((size_t)handle % SLICE) - 1; }
static int slice_of(void *handle) { return (int)((size_t)handle / SLICE) - 1; }

#define BEGIN(gpu) int problem = obey(__func__, (gpu)); if (problem) return problem

int nvmlInitWithFlags(unsigned flags) {
    char path[4096];
    FILE *opened;
    (void)flags;
    snprintf(path, sizeof path, "%s.opened", getenv("STANDIN_NVML_STATE"));
    opened = fopen(path, "a");
    if (opened) { fprintf(opened, "%d\n", getpid()); fclose(opened); }
    puts("the driver's library talks on standard output");
    fflush(stdout);
    BEGIN(-1);
    return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the stand-in"; }

/* Read the line "driver VERSION CUDA"; 1 if there is one. */
static int driver(char *version, int *cuda) {
    char line[LINE];
    FILE *file = state();
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) found = sscanf(line, "driver %79s %d", version, cuda) == 2;
    if (file) fclose(file);
    return found;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    char value[80];
    int cuda;
    BEGIN(-1);
    if (!driver(value, &cuda)) return NOT_SUPPORTED;
    snprintf(version, size, "%s", value);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *cuda) {
    char version[80];
    BEGIN(-1);
    return driver(version, cuda) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    char line[LINE];
    FILE *file;
    BEGIN(-1);
    file = state();
    *count = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "gpus %u", count) == 1) break;
    if (file) fclose(file);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    BEGIN((int)index);
    *handle = (void *)(size_t)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    char value[LINE], *word;
    int slice = slice_of(handle);
    BEGIN(gpu_of(handle));
    if (slice < 0) return find("uuid", gpu_of(handle), uuid, size) ? SUCCESS : UNKNOWN;
    if (!find("mig", gpu_of(handle), value, sizeof value)) return NOT_FOUND;
    for (word = strtok(value, " "); word && slice > 0; slice--) word = strtok(NULL, " ");
    if (!word) return NOT_FOUND;
    snprintf(uuid, size, "%s", word);
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    BEGIN(gpu_of(handle));
    return find("name", gpu_of(handle), name, size) ? SUCCESS : UNKNOWN;
}

static int read_memory(int gpu, unsigned long long *used, unsigned long long *total) {
    char value[LINE];
    if (!find("memory", gpu, value, sizeof value)) return NOT_SUPPORTED;
    return sscanf(value, "%llu %llu", used, total) == 2 ? SUCCESS : UNKNOWN;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    BEGIN(gpu_of(handle));
    problem = read_memory(gpu_of(handle), &memory->used, &memory->total);
    memory->free = memory->total - memory->used;
    return problem;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory) {
    BEGIN(gpu_of(handle));
    if (memory->version != 0x02000028) return 25;
    problem = read_memory(gpu_of(handle), &memory->used, &memory->total);
    memory->free = memory->total - memory->used;
    memory->reserved = 0;
    return problem;
}
#endif

int nvmlDeviceGetUtilizationRates(void *handle, utilization_t *rates) {
    char value[LINE];
    BEGIN(gpu_of(handle));
    if (!find("utilization", gpu_of(handle), value, sizeof value)) return NOT_SUPPORTED;
    rates->gpu = (unsigned)atoi(value);
    rates->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    char value[LINE];
    BEGIN(gpu_of(handle));
    if (!find("power", gpu_of(handle), value, sizeof value)) return NOT_SUPPORTED;
    *milliwatts = (unsigned)atoi(value);
    return SUCCESS;
}

#ifndef OLD_DRIVER
static int read_processes(const char *key, int gpu, unsigned *count, process_t *processes) {
    char value[LINE], *word;
    unsigned room = *count, found = 0;
    if (!find(key, gpu, value, sizeof value)) { *count = 0; return SUCCESS; }
    for (word = strtok(value, " "); word; word = strtok(NULL, " "), found++) {
        char *bytes = strchr(word, ':');
        if (!processes || found >= room) continue;
        memset(&processes[found], 0, sizeof processes[found]);
        processes[found].pid = (unsigned)atoi(word);
        processes[found].used = !bytes || bytes[1] == '-' ? ~0ULL : strtoull(bytes + 1, NULL, 10);
    }
    *count = found;
    return found > room || (found && !processes) ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *processes) {
    BEGIN(gpu_of(handle));
    return read_processes("compute", gpu_of(handle), count, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, process_t *processes) {
    BEGIN(gpu_of(handle));
    return read_processes("graphics", gpu_of(handle), count, processes);
}
#endif

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    char value[LINE];
    BEGIN(gpu_of(handle));
    *current = *pending = (unsigned)find("mig", gpu_of(handle), value, sizeof value);
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    BEGIN(gpu_of(handle));
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice) {
    BEGIN(gpu_of(handle));
    *slice = (void *)((size_t)handle + (size_t)SLICE * (index + 1));
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(void *slice, unsigned *id) {
    BEGIN(gpu_of(slice));
    *id = (unsigned)slice_of(slice) + 1;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, unsigned long long *count) {
    char value[LINE];
    BEGIN(gpu_of(handle));
    if (type != 1 || counter != 0) return INVALID;  /* uncorrected, volatile */
    if (!find("ecc", gpu_of(handle), value, sizeof value)) return NOT_SUPPORTED;
    *count = strtoull(value, NULL, 10);
    return SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    char value[LINE];
    BEGIN(gpu_of(handle));
    if (!find("rows", gpu_of(handle), value, sizeof value)) return NOT_SUPPORTED;
    return sscanf(value, "%u %u %u %u", corrected, uncorrected, pending, failed) == 4 ? SUCCESS : UNKNOWN;
}

int nvmlDeviceGetGpuFabricInfoV(void *handle, fabric_v2_t *info) {
    char value[LINE];
    BEGIN(gpu_of(handle));
    if (info->version != 0x02000024) return 25;
    if (!find("fabric", gpu_of(handle), value, sizeof value)) return NOT_SUPPORTED;
    return sscanf(value, "%u %u %u", &info->state, &info->status, &info->health) == 3 ? SUCCESS : UNKNOWN;
}

/* Find the event after the first `told`; return how many there are up to it, 0: no more. */
static int next_event(int told, event_t *event, int *gpu) {
    char line[LINE];
    FILE *file = state();
    int seen = 0, found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        if (sscanf(line, "event %d %llu %llu %u", gpu, &event->type, &event->data, &event->gpu_instance) == 4)
            found = ++seen > told;
    }
    if (file) fclose(file);
    event->device = (void *)(size_t)(*gpu + 1);
    event->compute_instance = ~0U;
    return found ? seen : 0;
}

int nvmlEventSetCreate(event_set_t **set) {
    event_t event;
    int gpu = 0;
    BEGIN(-1);
    *set = calloc(1, sizeof **set);
    while (next_event((*set)->told, &event, &gpu)) (*set)->told++;
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(void *handle, unsigned long long *types) {
    char value[LINE];
    BEGIN(gpu_of(handle));
    if (!find("events", gpu_of(handle), value, sizeof value)) return NOT_SUPPORTED;
    *types = strtoull(value, NULL, 10);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, event_set_t *set) {
    BEGIN(gpu_of(handle));
    set->types[gpu_of(handle)] = types;
    return SUCCESS;
}

int nvmlEventSetWait_v2(event_set_t *set, event_t *event, unsigned milliseconds) {
    int gpu = 0, upto;
    unsigned waited;
    for (waited = 0; ; waited += 10) {
        BEGIN(-1);
        while ((upto = next_event(set->told, event, &gpu))) {
            set->told = upto;
            if (set->types[gpu] & event->type) return SUCCESS;
        }
        if (waited >= milliseconds) return TIMEOUT;
        usleep(10000);
    }
}
#endif
