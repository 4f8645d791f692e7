"""Which arithmetic runs beside Hopper's tensor-core products, and which instead of them.

Writes overlap.cu: one warpgroup repeats batches of eight wgmma (64 x 128 x 16 in BF16, 64 x 128 x 32 in E4M3; A from shared
memory or from registers), the other one kind of arithmetic. On a machine with nvcc, then on one with a Hopper GPU:

    python gen.py && nvcc -arch=sm_90a -cubin -o overlap.cubin overlap.cu
    python run.py

Check with -Xptxas -v that ptxas does not say it serialised the products: it does when they sit in a function of their own.
"""

import pathlib


def wg(n, kind, rs):
    nacc = n // 2
    accs = ", ".join(f"%{i}" for i in range(nacc))
    accc = ", ".join(f'"+f"(c[{i}])' for i in range(nacc))
    if kind == "bf16":
        shape = f"m64n{n}k16.f32.bf16.bf16"
        tail_rs = "1, 1, 1, 0"
        tail_ss = "1, 1, 1, 0, 0"
    else:
        shape = f"m64n{n}k32.f32.e4m3.e4m3"
        tail_rs = "1, 1, 1"
        tail_ss = "1, 1, 1"
    if rs:
        a = "{" + ", ".join(f"%{nacc + i}" for i in range(4)) + "}"
        b = f"%{nacc + 4}"
        ins = ", ".join(f'"r"(a[{i}])' for i in range(4)) + ', "l"(db)'
        tail = tail_rs
    else:
        a = f"%{nacc}"
        b = f"%{nacc + 1}"
        ins = '"l"(da), "l"(db)'
        tail = tail_ss
    return f'asm volatile("wgmma.mma_async.sync.aligned.{shape} {{{accs}}}, {a}, {b}, {tail};" : {accc} : {ins});'


out = r"""
#include <cstdint>
__device__ __forceinline__ void fence(){asm volatile("wgmma.fence.sync.aligned;":::"memory");}
__device__ __forceinline__ void commit(){asm volatile("wgmma.commit_group.sync.aligned;":::"memory");}
__device__ __forceinline__ void wait0(){asm volatile("wgmma.wait_group.sync.aligned 0;":::"memory");}
"""
for kind in ("bf16", "fp8"):
    for rs in (0, 1):
        out += f"""
__device__ __forceinline__ long long mma_{kind}_{rs}(uint64_t da, uint64_t db, int iters, float* sink){{
  float c[64]; uint32_t a[4];
  for (int i=0;i<64;i++) c[i]=threadIdx.x*1e-3f+i; for(int i=0;i<4;i++) a[i]=threadIdx.x*77+i*1234567;
  long long t0=clock64();
  for (int it=0; it<iters; it++) {{
    fence();
    #pragma unroll
    for (int k=0;k<8;k++) {{ {wg(128, kind, rs)} }}
    commit(); wait0();
  }}
  long long t1=clock64();
  float s=0; for (int i=0;i<64;i++) s+=c[i];
  if (s==1.2345f) sink[threadIdx.x]=s;
  return t1-t0;
}}
"""
# arithmetic: 16 independent chains, kinds: ffma, fadd, ex2, mix (4 FFMA-like : 1 ex2)
out += r"""
template<int KIND> __device__ __noinline__ long long alu(int iters, float* sink, float b, float d){
  float x[32];
  for (int i=0;i<32;i++) x[i]=threadIdx.x*1e-6f+i*1e-3f;
  long long t0=clock64();
  for (int it=0; it<iters; it++) {
    #pragma unroll
    for (int r=0;r<4;r++) {
    #pragma unroll
    for (int i=0;i<32;i++) {
      if (KIND==0) x[i]=fmaf(x[i],b,d);
      if (KIND==1) asm volatile("ex2.approx.ftz.f32 %0,%0;":"+f"(x[i]));
      if (KIND==2) { float y=x[i]*b; y=fmaf(y,b,d); asm volatile("ex2.approx.ftz.f32 %0,%0;":"+f"(y)); x[i]=y+d; }
      if (KIND==3) x[i]=fmaf(x[i],b,x[(i+7)&31]);
      if (KIND==4) x[i]=x[i]*b;
      if (KIND==5) x[i]=x[i]+0.5f;
      if (KIND==6) asm volatile("add.s32 %0,%0,%1;":"+r"(((int*)x)[i]):"r"(__float_as_int(b)));
      if (KIND==7) asm volatile("max.f32 %0,%0,%1;":"+f"(x[i]):"f"(b));
      if (KIND==8) { float y=x[i]; asm volatile("ex2.approx.ftz.f32 %0,%0;":"+f"(y));
        y=fmaf(y,b,d); y=fmaf(y,d,b); y=fmaf(y,b,d); y=y*b; x[i]=fmaf(y,b,d);}
      if (KIND==9) { float y=x[i]; asm volatile("ex2.approx.ftz.f32 %0,%0;":"+f"(y));
        y=fmaf(y,b,d); y=fmaf(y,d,b); y=fmaf(y,b,d); y=y*b; y=fmaf(y,b,d); y=fmaf(y,d,b); x[i]=fmaf(y,b,d);}
      if (KIND==10) asm volatile("xor.b32 %0,%0,%1;":"+r"(((int*)x)[i]):"r"(__float_as_int(b)));
    } }
  }
  long long t1=clock64();
  float s=0; for (int i=0;i<32;i++) s+=x[i];
  if (s==1.2345f) sink[threadIdx.x]=s;
  return t1-t0;
}
extern "C" __global__ void __launch_bounds__(256,1) overlap(int m0, int m1, int it0, int it1,
    long long* out, float* sink, float b, float d){
  extern __shared__ __align__(1024) char sm[];
  for (int i=threadIdx.x;i<49152;i+=256) ((uint32_t*)sm)[i]=(i*2654435761u)&0x3f3f3f3f;
  asm volatile("fence.proxy.async;":::"memory");
  __syncthreads();
  uint32_t base=(uint32_t)__cvta_generic_to_shared(sm);
  int w=threadIdx.x/128;
  // 128B swizzle, SBO 1024
  uint64_t desc=((uint64_t)1<<62)|((uint64_t)(1024>>4)<<32)|((uint64_t)1<<16);
  uint64_t da=desc|((base+w*16384)>>4), db=desc|((base+65536+w*32768)>>4);
  int m = w? m1:m0; int it = w? it1: it0;
  long long t=0;
  if (m==1) t=mma_bf16_0(da,db,it,sink);
  if (m==2) t=mma_bf16_1(da,db,it,sink);
  if (m==3) t=mma_fp8_0(da,db,it,sink);
  if (m==4) t=mma_fp8_1(da,db,it,sink);
  if (m==10) t=alu<0>(it,sink,b,d);
  if (m==11) t=alu<1>(it,sink,b,d);
  if (m==12) t=alu<2>(it,sink,b,d);
  if (m==13) t=alu<3>(it,sink,b,d);
  if (m==14) t=alu<4>(it,sink,b,d);
  if (m==15) t=alu<5>(it,sink,b,d);
  if (m==16) t=alu<6>(it,sink,b,d);
  if (m==17) t=alu<7>(it,sink,b,d);
  if (m==18) t=alu<8>(it,sink,b,d);
  if (m==19) t=alu<9>(it,sink,b,d);
  if (m==20) t=alu<10>(it,sink,b,d);
  if ((threadIdx.x&127)==0 && blockIdx.x==0) out[w]=t;
}
"""
pathlib.Path("overlap.cu").write_text(out)
