// A device guard and hooks of "cuda" that do nothing. With them autograd of a CPU build of torch
// follows fake tensors on a GPU that is not there. Loaded before torch is imported (device.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
const c10::Device device(CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  bool queryEvent(void*) const override { return true; }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
};

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)  // found by this name
}  // namespace at
