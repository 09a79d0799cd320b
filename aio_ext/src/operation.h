#pragma once

namespace aio {

enum class Operation { read, write, sync };
enum class Priority { urgent, background };

}  // namespace aio
