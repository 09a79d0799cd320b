// Which instruction set runs: the best one that the processor reports, or the one that was asked for.
#pragma once

#include <string>
#include <vector>

#include "table.h"

namespace offload {

std::vector<const Table*> tables_supported();  // best first; never empty
const Table& table_in_use();
void use_table(const std::string& name);  // throws std::invalid_argument if it is unknown or the processor lacks it

}  // namespace offload
