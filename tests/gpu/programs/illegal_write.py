"""Write to an address that is nobody's, from a kernel: the driver tells of Xid 31. Prints CUDA's error code.

Needs the driver only: the kernel is PTX, which the driver compiles.
"""

import ctypes
import sys

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry wild()
{
    .reg .b64 %rd1;
    .reg .b32 %r1;
    mov.u64 %rd1, 0x7000000000;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        sys.exit(f"{name}: {code}")


device = ctypes.c_int()
context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuModuleLoadData", ctypes.byref(module), PTX)
call("cuModuleGetFunction", ctypes.byref(function), module, b"wild")
call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
print(cuda.cuCtxSynchronize(), flush=True)
