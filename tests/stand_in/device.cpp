// CUDA as far as torch's own code asks for it, on a machine without it: a count of devices, a current one, a stream of
// each. There is no memory and no kernel: tensors on it must be fake. Autograd gives such a device a thread of its own,
// as it does a real one. Loaded before torch, which looks for CUDA once.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::Stream, c10::kCUDA;

static DeviceIndex devices = 0;
static thread_local DeviceIndex current = 0;
extern "C" void set_devices(int count) { devices = count; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return Device(kCUDA, current); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kCUDA, device.has_index() ? device.index() : current));
  }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
};

static c10::impl::DeviceGuardImplRegistrar guard(kCUDA, new Guard());

namespace at {

struct Hooks final : CUDAHooksInterface {
  explicit Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasCUDA() const override { return devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

}  // namespace at
