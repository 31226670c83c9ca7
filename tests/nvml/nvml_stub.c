/* A stand-in for libnvidia-ml.so.1 with the entry points that nodeagent/nvml.py and nvmlmig.py reach through pynvml.
 *
 * It has no state of its own but which GPUs a process saw when it initialised: everything else is in the file that NVML_STUB_STATE names, which
 * tests map and change while processes use it (stub.py has the same layout). Structs that callers see are laid out as in NVIDIA's nvml.h;
 * test_layout.py compares them with those of the pynvml that is installed.
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int ret;
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, SMALL = 7, NO_DRIVER = 9, TIMEOUT = 10,
       LOST = 15, RESET = 16, IN_USE = 19, NO_ROOM = 23 };

enum { GPUS = 16, EVENTS = 64, PROFILES = 8, INSTANCES = 8, PROCESSES = 8, LINKS = 18 };
enum { A_GPU = 0x47, AN_INSTANCE = 0x49 };

/* ---- the state that tests change; stub.py: class State and so on */
typedef struct {
    uint32_t what, used, id, profile, start, size, compute, gpu;
    char uuid[96];
} Instance;

typedef struct {
    uint32_t used, number, id, slices, size, most, memory_mib, starts;
    char name[96];
} Profile;

typedef struct {
    uint32_t what, present, lost, minor, numa, topology;
    char uuid[96], name[96], bus[32];
    uint64_t memory_total, memory_used, energy_mj, reasons, ecc_corrected, ecc_uncorrected, nvlink_errors;
    uint32_t busy, memory_busy, power_mw, power_limit_mw, celsius, memory_celsius, sm_mhz, memory_mhz, has_ecc, pcie_replays, needs, compute_mode;
    uint32_t remapped[4];
    uint32_t links, links_up, links_counted_each, bridged_to;
    uint32_t mig_capable, mig_on, mig_needs_reset, processes;
    uint32_t pids[PROCESSES];
    uint64_t bytes[PROCESSES];
    Profile profiles[PROFILES];
    Instance instances[INSTANCES];
} Gpu;

typedef struct {
    uint32_t gpu, gone, gi, ci;
    uint64_t type, data;
} Event;

typedef struct {
    uint32_t count, no_driver, events, calls;
    char hang[64], crash[64], fail[64];
    uint32_t fail_with, spare;
    Event ring[EVENTS];
    Gpu gpus[GPUS];
} State;

static State *state;
static uint32_t initialised;

/* ---- structs of nvml.h */
typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } nvmlPciInfo_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct { void *device; unsigned long long eventType, eventData; unsigned gpuInstanceId, computeInstanceId; } nvmlEventData_t;
typedef union { double dVal; unsigned uiVal; unsigned long ulVal; unsigned long long ullVal; long long sllVal; int siVal; unsigned short usVal; } nvmlValue_t;
typedef struct { unsigned fieldId, scopeId; long long timestamp, latencyUsec; unsigned valueType; ret nvmlReturn; nvmlValue_t value; } nvmlFieldValue_t;
typedef struct { unsigned pid; unsigned long long usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;
typedef struct { unsigned start, size; } nvmlGpuInstancePlacement_t;
typedef struct { void *device; unsigned id, profileId; nvmlGpuInstancePlacement_t placement; } nvmlGpuInstanceInfo_t;
typedef struct {
    unsigned version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount, encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
    char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;
typedef struct {
    unsigned version, id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount;
    unsigned sharedJpegCount, sharedOfaCount;
    char name[96];
} nvmlComputeInstanceProfileInfo_v2_t;

/* ---- for test_layout.py */
#define SIZE(t) {#t, sizeof(t)}
#define AT(t, f) {#t "." #f, offsetof(t, f)}
static const struct { const char *name; size_t value; } layout[] = {
    SIZE(nvmlPciInfo_t), AT(nvmlPciInfo_t, domain), AT(nvmlPciInfo_t, pciSubSystemId), AT(nvmlPciInfo_t, busId),
    SIZE(nvmlMemory_t), AT(nvmlMemory_t, used), SIZE(nvmlUtilization_t), AT(nvmlUtilization_t, memory),
    SIZE(nvmlEventData_t), AT(nvmlEventData_t, eventType), AT(nvmlEventData_t, eventData), AT(nvmlEventData_t, gpuInstanceId),
    AT(nvmlEventData_t, computeInstanceId), SIZE(nvmlFieldValue_t), AT(nvmlFieldValue_t, scopeId), AT(nvmlFieldValue_t, valueType),
    AT(nvmlFieldValue_t, nvmlReturn), AT(nvmlFieldValue_t, value), SIZE(nvmlProcessInfo_t), AT(nvmlProcessInfo_t, usedGpuMemory),
    AT(nvmlProcessInfo_t, gpuInstanceId), SIZE(nvmlGpuInstancePlacement_t), AT(nvmlGpuInstancePlacement_t, size),
    SIZE(nvmlGpuInstanceInfo_t), AT(nvmlGpuInstanceInfo_t, id), AT(nvmlGpuInstanceInfo_t, profileId), AT(nvmlGpuInstanceInfo_t, placement),
    SIZE(nvmlGpuInstanceProfileInfo_v2_t), AT(nvmlGpuInstanceProfileInfo_v2_t, sliceCount), AT(nvmlGpuInstanceProfileInfo_v2_t, instanceCount),
    AT(nvmlGpuInstanceProfileInfo_v2_t, memorySizeMB), AT(nvmlGpuInstanceProfileInfo_v2_t, name),
    SIZE(nvmlComputeInstanceProfileInfo_v2_t), AT(nvmlComputeInstanceProfileInfo_v2_t, sliceCount),
    AT(nvmlComputeInstanceProfileInfo_v2_t, instanceCount), AT(nvmlComputeInstanceProfileInfo_v2_t, name),
    {"State", sizeof(State)}, AT(State, ring), AT(State, gpus), {"Gpu", sizeof(Gpu)}, AT(Gpu, memory_total), AT(Gpu, profiles), AT(Gpu, instances),
};
const char *stub_layout_name(unsigned at) { return at < sizeof layout / sizeof *layout ? layout[at].name : NULL; }
size_t stub_layout_value(unsigned at) { return layout[at].value; }

/* ---- faults */
static void pause_ms(unsigned ms) { struct timespec t = {ms / 1000, (ms % 1000) * 1000000L}; nanosleep(&t, NULL); }

static int named(const char *pattern, const char *function) { return pattern[0] == '*' || (pattern[0] && strcmp(pattern, function) == 0); }

static ret enter(const char *function) {
    if (!state) {
        const char *path = getenv("NVML_STUB_STATE");
        int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
        if (fd < 0) return NO_DRIVER;
        void *at = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (at == MAP_FAILED) return NO_DRIVER;
        state = at;
    }
    __sync_fetch_and_add(&state->calls, 1);
    while (named(state->hang, function)) pause_ms(5);
    if (named(state->crash, function)) *(volatile int *)0 = 1;
    if (named(state->fail, function)) return (ret)state->fail_with;
    return OK;
}

#define ENTER do { ret entered = enter(__func__); if (entered) return entered; if (!initialised) return UNINITIALIZED; } while (0)
#define GPU(device) Gpu *g = device; ENTER; if (!g || g->what != A_GPU) return INVALID; if (g->lost) return LOST

static unsigned number_of(const Gpu *g) { return (unsigned)(g - state->gpus); }

static Gpu *visible(unsigned index) {
    for (unsigned i = 0; i < state->count; i++)
        if (state->gpus[i].present && index-- == 0) return &state->gpus[i];
    return NULL;
}

static ret text(char *out, unsigned size, const char *from) {
    if (strlen(from) >= size) return SMALL;
    strcpy(out, from);
    return OK;
}

/* ---- the system */
ret nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    ret entered = enter(__func__);
    if (entered) return entered;
    if (state->no_driver) return NO_DRIVER;
    initialised++;
    return OK;
}
ret nvmlShutdown(void) { ENTER; initialised--; return OK; }
const char *nvmlErrorString(ret code) { (void)code; return "stand-in error"; }
ret nvmlSystemGetDriverVersion(char *out, unsigned size) { ENTER; return text(out, size, "570.86.15"); }

ret nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER;
    for (*count = 0; visible(*count); ++*count) {}
    return OK;
}
ret nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    ENTER;
    Gpu *g = visible(index);
    if (!g) return INVALID;
    if (g->lost) return LOST;
    *device = g;
    return OK;
}

/* ---- what a GPU is */
ret nvmlDeviceGetUUID(void *device, char *out, unsigned size) {
    Instance *one = device;
    if (one && one->what == AN_INSTANCE) { ENTER; return one->used ? text(out, size, one->uuid) : NOT_FOUND; }
    GPU(device);
    return text(out, size, g->uuid);
}
ret nvmlDeviceGetName(void *device, char *out, unsigned size) { GPU(device); return text(out, size, g->name); }
ret nvmlDeviceGetMemoryInfo(void *device, nvmlMemory_t *out) {
    GPU(device);
    *out = (nvmlMemory_t){g->memory_total, g->memory_total - g->memory_used, g->memory_used};
    return OK;
}
ret nvmlDeviceGetMinorNumber(void *device, unsigned *out) { GPU(device); *out = g->minor; return OK; }
ret nvmlDeviceGetPciInfo_v3(void *device, nvmlPciInfo_t *out) {
    GPU(device);
    memset(out, 0, sizeof *out);
    strcpy(out->busId, g->bus);
    return OK;
}
ret nvmlDeviceGetMemoryAffinity(void *device, unsigned words, unsigned long long *out, unsigned scope) {
    GPU(device);
    if (scope > 1) return INVALID;
    memset(out, 0, words * sizeof *out);
    if (g->numa / 64 < words) out[g->numa / 64] = 1ULL << (g->numa % 64);
    return OK;
}
ret nvmlDeviceGetTopologyCommonAncestor(void *device, void *with, unsigned *level) {
    GPU(device);
    Gpu *other = with;
    if (other->lost) return LOST;
    *level = g->topology == other->topology ? 20 : g->numa == other->numa ? 40 : 50;
    return OK;
}
ret nvmlDeviceGetComputeMode(void *device, unsigned *mode) { GPU(device); *mode = g->compute_mode; return OK; }

/* ---- what it does */
ret nvmlDeviceGetUtilizationRates(void *device, nvmlUtilization_t *out) {
    GPU(device);
    if (g->mig_on) return NOT_SUPPORTED;
    *out = (nvmlUtilization_t){g->busy, g->memory_busy};
    return OK;
}
#define FIGURE(name, type, field) ret name(void *device, type *out) { GPU(device); *out = g->field; return OK; }
FIGURE(nvmlDeviceGetPowerUsage, unsigned, power_mw)
FIGURE(nvmlDeviceGetEnforcedPowerLimit, unsigned, power_limit_mw)
FIGURE(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, energy_mj)
FIGURE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, reasons)
ret nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *out) { GPU(device); if (sensor) return INVALID; *out = g->celsius; return OK; }
ret nvmlDeviceGetClockInfo(void *device, unsigned type, unsigned *out) {
    GPU(device);
    if (type != 1 && type != 2) return INVALID;
    *out = type == 1 ? g->sm_mhz : g->memory_mhz;
    return OK;
}
ret nvmlDeviceGetTotalEccErrors(void *device, unsigned error, unsigned counter, unsigned long long *out) {
    GPU(device);
    if (!g->has_ecc) return NOT_SUPPORTED;
    if (error > 1 || counter) return INVALID;
    *out = error ? g->ecc_uncorrected : g->ecc_corrected;
    return OK;
}
ret nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    GPU(device);
    if (!g->has_ecc) return NOT_SUPPORTED;
    *corrected = g->remapped[0]; *uncorrected = g->remapped[1]; *pending = g->remapped[2]; *failed = g->remapped[3];
    return OK;
}
ret nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, nvmlProcessInfo_t *out) {
    GPU(device);
    unsigned room = *count;
    *count = g->processes;
    if (g->processes > room) return SMALL;
    for (unsigned i = 0; i < g->processes; i++) out[i] = (nvmlProcessInfo_t){g->pids[i], g->bytes[i], ~0u, ~0u};
    return OK;
}
ret nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *up) {
    GPU(device);
    if (link >= g->links) return INVALID;
    *up = g->links_up >> link & 1;
    return OK;
}
ret nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, nvmlPciInfo_t *out) {
    GPU(device);
    if (link >= g->links) return INVALID;
    memset(out, 0, sizeof *out);
    strcpy(out->busId, g->bridged_to ? state->gpus[g->bridged_to - 1].bus : "00000000:FF:00.0"); /* else a switch */
    return OK;
}
static ret field(const Gpu *g, nvmlFieldValue_t *f) {
    f->valueType = 3;
    switch (f->fieldId) {
    case 82: f->valueType = 1; f->value.uiVal = g->memory_celsius; return OK;
    case 94: f->valueType = 1; f->value.uiVal = g->pcie_replays; return OK;
    case 230: f->valueType = 1; f->value.uiVal = g->needs; return OK;
    case 38: case 45: case 52: case 59:
        if (g->links_counted_each || !g->links) return NOT_SUPPORTED;
        f->value.ullVal = f->fieldId == 52 ? g->nvlink_errors : 0;
        return OK;
    case 161: case 162: case 163:
        if (!g->links_counted_each || f->scopeId >= g->links) return NOT_SUPPORTED;
        f->value.ullVal = f->fieldId == 161 && f->scopeId == 0 ? g->nvlink_errors : 0;
        return OK;
    default: return NOT_SUPPORTED;
    }
}
ret nvmlDeviceGetFieldValues(void *device, int count, nvmlFieldValue_t *values) {
    GPU(device);
    for (int i = 0; i < count; i++) values[i].nvmlReturn = field(g, &values[i]);
    return OK;
}

/* ---- events: each set has read the ring up to a point of its own */
typedef struct { uint32_t read, gpus; uint64_t types; } Set;

ret nvmlEventSetCreate(void **set) {
    ENTER;
    Set *new = calloc(1, sizeof *new);
    new->read = state->events;
    *set = new;
    return OK;
}
ret nvmlEventSetFree(void *set) { ENTER; free(set); return OK; }
ret nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types) { GPU(device); *types = g->has_ecc ? 0x1b : 0x18; return OK; }
ret nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
    GPU(device);
    if (types & ~(g->has_ecc ? 0x1bULL : 0x18ULL)) return NOT_SUPPORTED;
    ((Set *)set)->gpus |= 1u << number_of(g);
    ((Set *)set)->types |= types;
    return OK;
}
ret nvmlEventSetWait_v2(void *from, nvmlEventData_t *data, unsigned timeout_ms) {
    ENTER;
    Set *set = from;
    for (unsigned waited = 0;; waited += 5) {
        while (set->read != state->events) {
            Event e = state->ring[set->read++ % EVENTS];
            if (e.gone) return LOST;
            if (!(set->gpus >> e.gpu & 1) || !(set->types & e.type)) continue;
            *data = (nvmlEventData_t){&state->gpus[e.gpu], e.type, e.data, e.gi, e.ci};
            return OK;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        pause_ms(5);
        ret entered = enter(__func__);
        if (entered) return entered;
    }
}

/* ---- MIG */
ret nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *later) {
    GPU(device);
    if (!g->mig_capable) return NOT_SUPPORTED;
    *now = *later = g->mig_on;
    return OK;
}
ret nvmlDeviceSetMigMode(void *device, unsigned mode, ret *activation) {
    GPU(device);
    if (!g->mig_capable) return NOT_SUPPORTED;
    *activation = OK;
    if (g->processes) { *activation = IN_USE; return OK; }
    if (g->mig_needs_reset) { *activation = RESET; return OK; }
    for (unsigned i = 0; !mode && i < INSTANCES; i++)
        if (g->instances[i].used) return IN_USE;
    g->mig_on = mode;
    return OK;
}
static Profile *profile_of(Gpu *g, unsigned value, int by_id) {
    for (unsigned i = 0; i < PROFILES; i++)
        if (g->profiles[i].used && (by_id ? g->profiles[i].id : g->profiles[i].number) == value) return &g->profiles[i];
    return NULL;
}
ret nvmlDeviceGetGpuInstanceProfileInfoV(void *device, unsigned number, nvmlGpuInstanceProfileInfo_v2_t *info) {
    GPU(device);
    if (info->version != (sizeof *info | 2u << 24)) return 25;
    if (!g->mig_on) return NOT_SUPPORTED;
    Profile *p = profile_of(g, number, 0);
    if (!p) return NOT_SUPPORTED;
    info->id = p->id; info->sliceCount = p->slices; info->instanceCount = p->most; info->memorySizeMB = p->memory_mib;
    strcpy(info->name, p->name);
    return OK;
}
static unsigned overlapping(const Gpu *g, unsigned start, unsigned size) {
    unsigned found = 0;
    for (unsigned i = 0; i < INSTANCES; i++) {
        const Instance *one = &g->instances[i];
        found += one->used && start < one->start + one->size && one->start < start + size;
    }
    return found;
}
ret nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *device, unsigned id, nvmlGpuInstancePlacement_t *out, unsigned *count) {
    GPU(device);
    Profile *p = profile_of(g, id, 1);
    if (!p) return INVALID;
    unsigned n = 0;
    for (unsigned start = 0; start < 8; start++)
        if (p->starts >> start & 1) { if (out) out[n] = (nvmlGpuInstancePlacement_t){start, p->size}; n++; }
    *count = n;
    return OK;
}
ret nvmlDeviceCreateGpuInstanceWithPlacement(void *device, unsigned id, const nvmlGpuInstancePlacement_t *place, void **made) {
    GPU(device);
    Profile *p = profile_of(g, id, 1);
    if (!g->mig_on) return NOT_SUPPORTED;
    if (!p || place->start > 7 || !(p->starts >> place->start & 1) || place->size != p->size) return INVALID;
    if (overlapping(g, place->start, place->size)) return NO_ROOM;
    for (unsigned i = 0; i < INSTANCES; i++)
        if (!g->instances[i].used) {
            Instance *one = &g->instances[i];
            *one = (Instance){.what = AN_INSTANCE, .used = 1, .id = i + 1, .profile = id, .start = place->start, .size = p->size, .gpu = number_of(g)};
            snprintf(one->uuid, sizeof one->uuid, "MIG-%08x-0000-0000-%04x-%06x%06x", number_of(g), place->start, id, ++state->spare);
            *made = one;
            return OK;
        }
    return NO_ROOM;
}
ret nvmlGpuInstanceDestroy(void *instance) {
    ENTER;
    Instance *one = instance;
    if (one->compute || state->gpus[one->gpu].processes) return IN_USE;
    one->used = 0;
    return OK;
}
ret nvmlDeviceGetGpuInstances(void *device, unsigned id, void **out, unsigned *count) {
    GPU(device);
    *count = 0;
    for (unsigned i = 0; i < INSTANCES; i++)
        if (g->instances[i].used && g->instances[i].profile == id) out[(*count)++] = &g->instances[i];
    return OK;
}
ret nvmlGpuInstanceGetInfo(void *instance, nvmlGpuInstanceInfo_t *info) {
    ENTER;
    Instance *one = instance;
    if (!one->used) return NOT_FOUND;
    *info = (nvmlGpuInstanceInfo_t){&state->gpus[one->gpu], one->id, one->profile, {one->start, one->size}};
    return OK;
}
static const unsigned compute_slices[] = {1, 2, 3, 4, 7, 8, 6, 1, 7};
ret nvmlGpuInstanceGetComputeInstanceProfileInfoV(void *instance, unsigned number, unsigned engine, nvmlComputeInstanceProfileInfo_v2_t *info) {
    ENTER;
    Instance *one = instance;
    Profile *p = profile_of(&state->gpus[one->gpu], one->profile, 1);
    if (info->version != (sizeof *info | 2u << 24)) return 25;
    if (engine || number > 8) return INVALID;
    if (number > 4 || compute_slices[number] > p->slices) return NOT_SUPPORTED;
    info->id = number; info->sliceCount = compute_slices[number]; info->instanceCount = p->slices / compute_slices[number];
    return OK;
}
/* a compute instance is named by its GPU instance: there is at most one, with `compute` = its profile + 1 */
ret nvmlGpuInstanceCreateComputeInstance(void *instance, unsigned id, void **made) {
    ENTER;
    Instance *one = instance;
    if (one->compute) return NO_ROOM;
    one->compute = id + 1;
    *made = one;
    return OK;
}
ret nvmlGpuInstanceGetComputeInstances(void *instance, unsigned id, void **out, unsigned *count) {
    ENTER;
    Instance *one = instance;
    *count = one->used && one->compute == id + 1;
    if (*count) out[0] = one;
    return OK;
}
ret nvmlComputeInstanceDestroy(void *compute) {
    ENTER;
    Instance *one = compute;
    if (state->gpus[one->gpu].processes) return IN_USE;
    one->compute = 0;
    return OK;
}
ret nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { GPU(device); *count = g->mig_capable ? 7 : 0; return OK; }
ret nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **out) {
    GPU(device);
    for (unsigned i = 0; i < INSTANCES; i++)
        if (g->instances[i].used && g->instances[i].compute && index-- == 0) { *out = &g->instances[i]; return OK; }
    return NOT_FOUND;
}
ret nvmlDeviceGetGpuInstanceId(void *device, unsigned *id) {
    ENTER;
    Instance *one = device;
    if (one->what != AN_INSTANCE) return NOT_SUPPORTED;
    *id = one->id;
    return OK;
}
