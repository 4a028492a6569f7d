// Whether two declarations of one C function are the same to a compiler that calls it: as many arguments, each of the
// same size and kind. What may differ is spelling: an enumeration for an int of its size, one name of an opaque
// structure for another, void* for any pointer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace fastpersist::abi {

// Structures have no rule: whoever compared two of them field by field says so here.
template <class Ours, class Theirs>
constexpr bool kSameRecord = std::is_same_v<Ours, Theirs>;

template <class T>
constexpr bool kIsComplete = requires { sizeof(T); };
template <class T>
constexpr bool kIsInteger = std::is_integral_v<T> || std::is_enum_v<T>;

template <class Ours, class Theirs>
consteval bool SameValue();

template <class Ours, class Theirs>
consteval bool SameTarget() {
  if constexpr (std::is_const_v<Ours> != std::is_const_v<Theirs>) {
    return false;
  } else if constexpr (std::is_void_v<Ours> || std::is_same_v<Ours, Theirs>) {
    return true;
  } else if constexpr (!kIsComplete<Ours> || !kIsComplete<Theirs>) {
    return !kIsComplete<Ours> && !kIsComplete<Theirs>;
  } else {
    return SameValue<std::remove_cv_t<Ours>, std::remove_cv_t<Theirs>>();
  }
}

template <class Ours, class Theirs>
consteval bool SameValue() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    return SameTarget<std::remove_pointer_t<Ours>, std::remove_pointer_t<Theirs>>();
  } else if constexpr (kIsInteger<Ours> && kIsInteger<Theirs>) {
    // The sign of an enumeration is the compiler's choice. That of an integer decides how a short one is widened.
    return sizeof(Ours) == sizeof(Theirs) &&
           (std::is_enum_v<Ours> || std::is_enum_v<Theirs> || std::is_signed_v<Ours> == std::is_signed_v<Theirs>);
  } else {
    return kSameRecord<Ours, Theirs>;
  }
}

// As SameValue, for a double, whose handles are integers: of the same size and in the same kind of register.
template <class Ours, class Theirs>
consteval bool SameRegister() {
  constexpr bool kOurs = kIsInteger<Ours> || std::is_pointer_v<Ours>;
  constexpr bool kTheirs = kIsInteger<Theirs> || std::is_pointer_v<Theirs>;
  if constexpr (kOurs && kTheirs) {
    return sizeof(Ours) == sizeof(Theirs);
  } else {
    return kSameRecord<Ours, Theirs>;
  }
}

template <class Ours, class Theirs>
struct Calls {
  static constexpr bool kSame = false;
  static constexpr bool kSameRegisters = false;
};

template <class Result, class... Arguments, class TheirResult, class... TheirArguments>
  requires(sizeof...(Arguments) == sizeof...(TheirArguments))
struct Calls<Result(Arguments...), TheirResult(TheirArguments...)> {
  static constexpr bool kSame =
      SameValue<Result, TheirResult>() && (true && ... && SameValue<Arguments, TheirArguments>());
  static constexpr bool kSameRegisters =
      SameRegister<Result, TheirResult>() && (true && ... && SameRegister<Arguments, TheirArguments>());
};

template <class Ours, class Theirs>
constexpr bool kSameCall = Calls<std::remove_pointer_t<Ours>, std::remove_pointer_t<Theirs>>::kSame;
template <class Ours, class Theirs>
constexpr bool kSameRegisters = Calls<std::remove_pointer_t<Ours>, std::remove_pointer_t<Theirs>>::kSameRegisters;

// --- what differs is seen ---

enum class Small : uint8_t {};
struct OpaqueA;
struct OpaqueB;
struct Record {
  int field;
};

static_assert(kSameCall<int (*)(unsigned, OpaqueA*, void*), int(unsigned, OpaqueB*, long*)>);
static_assert(kSameCall<int(unsigned long), int(unsigned long long)>);
static_assert(!kSameCall<int(unsigned), int(unsigned, unsigned)>, "an argument too few");
static_assert(!kSameCall<int(unsigned), int(unsigned long)>, "a shorter argument");
static_assert(!kSameCall<int(unsigned), int(Small)>, "a longer argument");
static_assert(!kSameCall<int(unsigned char), int(signed char)>, "another sign");
static_assert(!kSameCall<int(long), int(void*)>, "an integer for a pointer");
static_assert(!kSameCall<int(long), int(double)>, "another register");
static_assert(!kSameCall<int(int*), int(long*)>, "a pointer to something shorter");
static_assert(!kSameCall<int(void*), int(const void*)>, "what is written to");
static_assert(!kSameCall<int(OpaqueA*), int(OpaqueB**)>, "a handle for where one is put");
static_assert(!kSameCall<int(OpaqueA*), int(Record*)>, "a structure that is known");
static_assert(!kSameCall<int(), long()>, "another result");
static_assert(kSameRegisters<int(uint64_t), int(OpaqueA*)>);
static_assert(!kSameRegisters<int(unsigned), int(OpaqueA*)>, "half of a handle");
static_assert(!kSameRegisters<int(uint64_t), int(double)>, "another register");

}  // namespace fastpersist::abi

// Whether a name is declared by itself: the header's macros that add a version to a name turn it into another one, and
// the declaration is then not that of the name. To be used with #name, which no macro has turned yet.
#define FP_ABI_TEXT(text) #text
#define FP_ABI_TURNED(name) FP_ABI_TEXT(name)
#define FP_ABI_IS_ITS_OWN(spelled, name) \
  static_assert(std::string_view(spelled) == FP_ABI_TURNED(name), spelled " is a macro for another name")
